"""Reinforcement learning under every layout: the trainer agrees with its rollouts, and trains as one rank does."""

from pathlib import Path
from typing import Any

import pytest
from support.matrix import MODELS, PARALLEL
from support.pool import Pool
from support.preference import OF_MODELS
from support.rollouts import SHORT, policy_run, write_rows

FAST = {("dp2", "dense", "grpo"), ("ep2", "moe", "gspo")}
CASES = [
    *sorted(FAST),
    ("tp2", "dense", "grpo"),
    ("pp2", "dense", "grpo"),
    ("cp2", "dense", "gspo"),
    ("tp2 cp2", "llava", "dapo"),
    ("pp2 vpp2", "gdn", "cispo"),
    ("tp2 sp", "deepstack", "rloo"),
    ("cp2 ep2", "omni", "gspo"),
]
SAME = (
    "reward",
    "reward_std",
    "answer_tokens",
    "answers_cut",
    "loss",
    "grad_norm",
    "labels",
    "entropy",
    "clipped/low",
    "clipped/high",
)


@pytest.mark.parametrize(
    ("parallel", "name", "algorithm"),
    [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in CASES],
)
def test_a_layout_trains_as_one_rank_and_agrees_with_its_rollouts(
    parallel: str, name: str, algorithm: str, pool: Pool, tmp_path: Path
) -> None:
    model, setting = MODELS[name], PARALLEL[parallel]
    common = (
        *write_rows(tmp_path / "rows.jsonl", 7, OF_MODELS.get(name, ("image", "text"))), *model.overrides, *SHORT,
        f"model.init={model.write(tmp_path / 'model')}", f"rl.algorithm={algorithm}", "rl.updates=2", "rl.entropy=0.01", "train.steps=4",
        *(("rl.router_replay=false",) if {"cp", "pp"} & setting.kinds else ()),
    )  # fmt: skip
    wanted = run(pool, 1, model.recipe, (*common, f"run.dir={tmp_path / 'alone'}"))
    more = (*common, *setting.overrides, f"run.dir={tmp_path / 'spread'}")
    found = run(pool, setting.ranks, model.recipe, more)
    assert len(found) == len(wanted) == 4
    for one, other in zip(found, wanted, strict=True):
        for key in SAME:
            assert one[key] == pytest.approx(other[key], rel=2e-4, abs=2e-5), (key, other["step"])
        for record in (one, other):
            assert record["logprob_difference/max"] <= 1e-5
    assert any(one["loss"] for one in wanted) and any(one["reward_std"] for one in wanted)


def run(pool: Pool, ranks: int, recipe: str, overrides: tuple[str, ...]) -> list[dict[str, Any]]:
    return pool.run(ranks, policy_run, recipe, overrides, timeout=400.0)[0]


def test_updates_of_a_rollout_begin_at_a_ratio_of_one(pool: Pool, tmp_path: Path) -> None:
    model = MODELS["text"]
    common = (
        *write_rows(tmp_path / "rows.jsonl", 5, ("text",)), *SHORT, f"model.init={model.write(tmp_path / 'model')}",
    )  # fmt: skip
    for updates in (1, 2):
        more = (*common, f"rl.updates={updates}", f"run.dir={tmp_path / str(updates)}")
        first, second = run(pool, 1, model.recipe, more)
        assert first["ratio"] == 1.0, "to the bit"
        assert (second["ratio"] == 1.0) is (updates == 1)
