"""A reward model in a run of reinforcement learning gives transformers' scores, under every layout."""

from pathlib import Path

import pytest
from support.matrix import MODELS, PARALLEL
from support.pool import Pool
from support.reward_models import hf_scores, write_classifier, zoo_scores

from zoo.errors import UserError


@pytest.mark.parametrize(
    "parallel", [None, "dp2", *(pytest.param(p, marks=pytest.mark.slow) for p in ("tp2 sp", "pp2", "cp2"))]
)
def test_scores_are_those_of_transformers(parallel: str | None, pool: Pool, tmp_path: Path) -> None:
    model = MODELS["text"]
    written = model.write(tmp_path / "model")
    folder = write_classifier(Path(written), tmp_path / "reward")
    setting = PARALLEL[parallel] if parallel else None
    overrides = (
        *model.overrides, f"model.init={written}", f"rl.reward_model={folder}", "rl.rewards={model: 1}", "packing.budget=64", "rl.max_new_tokens=16",
        "packing.align=8", "data.train=[digits:train]", *(setting.overrides if setting else ()),
    )  # fmt: skip
    found = pool.run(setting.ranks if setting else 1, zoo_scores, model.recipe, overrides, timeout=300.0)
    assert found[0] == pytest.approx(hf_scores(folder), abs=2e-5)
    assert all(of_rank == found[0] for of_rank in found)


def test_a_language_model_is_no_reward_model(pool: Pool, tmp_path: Path) -> None:
    written = MODELS["text"].write(tmp_path / "model")
    overrides = (f"model.init={written}", f"rl.reward_model={written}", "rl.rewards={model: 1}")
    with pytest.raises((UserError, Exception), match="it gives no score"):
        pool.run(1, zoo_scores, MODELS["text"].recipe, overrides, timeout=300.0)
