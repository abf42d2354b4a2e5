"""A run with a teacher under every layout has the losses, divergences and gradient norms of one rank."""

from pathlib import Path
from typing import Any

import pytest
from support.matrix import MODELS, PARALLEL
from support.pool import Pool
from support.preference import OF_MODELS, pair_run, write_pairs

CASES = [
    ("tp2 cp2", "dense"), ("pp2 vpp2", "dense"), ("tp2", "gdn"), ("dp2", "dense"), ("ep2 etp2", "moe"), ("cp2 ep2", "omni"),
    ("cp2", "gdn"), ("pp2", "text"),
]  # fmt: skip


def write_tokens(rank: int, size: int, recipe: str, overrides: tuple[str, ...], out: str) -> dict[str, int]:
    """What a teacher says of data.eval, written by these ranks."""
    from support.recipes import load_effective

    from zoo.tools.top_tokens import top_tokens_here

    made = load_effective(recipe, ["hardware=cpu", "engine.threads=1", *overrides])
    asked = {key: value for key, _, value in (one.partition("=") for one in overrides)}
    names = [key for key in ("distill.top_k", "distill.temperature") if key in asked]
    return top_tokens_here(
        made.replace({key: float(asked[key]) if "temp" in key else int(asked[key]) for key in names}), out
    )


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "name"), CASES)
def test_a_layout_learns_from_a_teacher_as_one_rank(parallel: str, name: str, pool: Pool, tmp_path: Path) -> None:
    model, setting = MODELS[name], PARALLEL[parallel]
    folder, teacher = model.write(tmp_path / "model"), tmp_path / "taught"
    kinds = OF_MODELS.get(name, ("image", "text"))
    common = (
        *write_pairs(tmp_path / "rows.jsonl", 7, kinds), *model.overrides, f"model.init={folder}", "train.steps=3", "train.global_batch=2",
        "train.lr=1e-2", "train.schedule=constant", "packing.align=8", "packing.budget=512", "data.lookahead=4", "train.aux_loss=0",
    )  # fmt: skip
    # The teacher is a run that has learnt something else.
    pool.run(1, pair_run, model.recipe, (*common, f"run.dir={teacher}", "train.mtp_loss=0"), "kl", timeout=300.0)
    common = (*common, f"distill.teacher={teacher}", "distill.top_k=7", "distill.temperature=1.5", "data.eval=none")
    alone, spread = (f"run.dir={tmp_path / one}" for one in ("alone", "spread"))
    wanted = pool.run(1, pair_run, model.recipe, (*common, alone), "kl", timeout=300.0)[0]
    found = pool.run(setting.ranks, pair_run, model.recipe, (*common, *setting.overrides, spread), "kl", timeout=300.0)[
        0
    ]
    as_one(found, wanted)
    if name == "dense":
        speak = (*common, *setting.overrides, f"model.init={teacher}", "distill.teacher=null", "packing.budget=256")
        speak = (*speak, next(one.replace("train", "eval") for one in common if one.startswith("data.train")))
        done = pool.run(setting.ranks, write_tokens, model.recipe, speak, str(tmp_path / "spoken"), timeout=300.0)
        assert done[0]["rows"] == 7 and done[0]["files"] == 1
        disk = (*common, *setting.overrides, f"distill.teacher={tmp_path / 'spoken'}", f"run.dir={tmp_path / 'disk'}")
        as_one(pool.run(setting.ranks, pair_run, model.recipe, disk, "kl", timeout=300.0)[0], wanted)


def as_one(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """The records of two runs agree."""
    assert len(found) == len(wanted) == 3 and wanted[0]["kl"] > 1e-3
    for one, other in zip(found, wanted, strict=True):
        for key in ("loss", "ce", "kl", "grad_norm", "labels"):
            assert one[key] == pytest.approx(other[key], rel=3e-4, abs=2e-5), key
        assert one["loss"] == pytest.approx(0.5 * one["ce"] + 0.5 * 1.5**2 * one["kl"], rel=1e-5)
