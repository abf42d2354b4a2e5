"""Reinforcement learning under every layout: the trainer agrees with its rollouts, and trains as one rank does."""

import json
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
    ("pp2", "moe", "gspo"),
    ("pp2 vpp2", "moe", "grpo"),
    ("cp2", "moe", "dapo"),
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


TIMED = ("time", "step_ms", "data_ms", "data_wait")  # and what ends in _seconds


def plain(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in TIMED and not name.endswith("_seconds")}


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, ("rl.kl=0.05", "rl.updates=2")),
        pytest.param(2, ("rl.ahead=1", "rl.dynamic_sampling=2"), marks=pytest.mark.slow),
        pytest.param(2, ("parallel.tp=2", "lora.rank=4", "rl.kl=0.05"), marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_goes_on_to_the_bit(ranks: int, more: tuple[str, ...], pool: Pool, tmp_path: Path) -> None:
    model = MODELS["dense"]
    common = (
        *write_rows(tmp_path / "rows.jsonl", 7, ("image", "text")), *SHORT, f"model.init={model.write(tmp_path / 'model')}",
        "train.save_every=4", *more,
    )  # fmt: skip
    wanted = run(pool, ranks, model.recipe, (*common, "train.steps=6", f"run.dir={tmp_path / 'whole'}"))
    run(pool, ranks, model.recipe, (*common, "train.steps=4", f"run.dir={tmp_path / 'stopped'}"))
    found = run(pool, ranks, model.recipe, (*common, "train.steps=6", f"run.dir={tmp_path / 'stopped'}"))
    assert [plain(one) for one in found] == [plain(one) for one in wanted]
    assert [one["step"] for one in found] == [1, 2, 3, 4, 5, 6]
    if "rl.kl=0.05" in more:
        assert wanted[0]["kl"] == pytest.approx(0, abs=1e-6) and wanted[-1]["kl"] > 1e-5, "the reference stays"
    if "rl.ahead=1" in more:
        assert [one["lag"] for one in wanted] == [0, 1, 1, 1, 0, 1], "nothing is ahead where a run may be resumed"


def test_rollouts_of_one_seed_are_the_same_and_of_another_are_not(pool: Pool, tmp_path: Path) -> None:
    model = MODELS["text"]
    common = (
        *write_rows(tmp_path / "rows.jsonl", 5, ("text",)),
        *SHORT,
        f"model.init={model.write(tmp_path / 'model')}",
    )
    first, again, other = (
        run(pool, 1, model.recipe, (*common, f"run.seed={seed}", f"run.dir={tmp_path / name}"))
        for name, seed in (("first", 7), ("again", 7), ("other", 8))
    )
    assert [plain(one) for one in first] == [plain(one) for one in again]
    assert first[0]["reward"] != other[0]["reward"]


def test_groups_of_equal_rewards_are_told_and_rewards_get_what_rows_have_for_them(pool: Pool, tmp_path: Path) -> None:
    model, file, own = MODELS["text"], tmp_path / "rows.jsonl", tmp_path / "own.py"
    own.write_text(
        "def reward(answer, references, row, *, bonus, unit='kg'):\n    return bonus + 10 * (unit == 'lb')\n"
    )
    overrides = write_rows(file, 4, ("text",))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    extras = [{"bonus": 0.25}, {"bonus": 1, "unit": "lb"}, {"unit": "g", "bonus": -2}, {"bonus": 3}]
    file.write_text("".join(json.dumps(row | {"extra": one}) + "\n" for row, one in zip(rows, extras, strict=True)))
    common = (
        *overrides, *SHORT, f"model.init={model.write(tmp_path / 'model')}", f"rl.rewards={{'{own}:reward': 1}}",
        "rl.dynamic_sampling=2", "rl.algorithm=dapo", "rl.overlong_buffer=0", f"run.dir={tmp_path / 'run'}", "train.steps=1",
    )  # fmt: skip
    ((step,),) = pool.run(1, policy_run, model.recipe, common, True, timeout=400.0)
    assert step["reward"] == pytest.approx((0.25 + 11 - 2 + 3) / 4)
    assert (step["groups"], step["groups_kept"], step["labels"], step["skipped"]) == (8, 0, 0, "labels")
    for name in ("loss", "ratio", "entropy", "importance/max", "logprob_difference/max"):
        assert step[name] is None, name
    lines = [json.loads(line) for line in (tmp_path / "run" / "train.jsonl").read_text().splitlines()]
    (why,) = [line["why"] for line in lines if line.get("event") == "skip"]
    assert "answers to 0 of 8 prompts in 2 rounds (rl.dynamic_sampling) have different rewards; take prompts" in why
