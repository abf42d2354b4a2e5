"""A step that is bad on one rank is left out on all ranks without a trace; the run after it is equal to the bit."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import rank_tasks
from support.poison import train_poisoned, train_recording_rates
from support.pool import Pool, PoolError

COMMON = (
    "train.steps=5",
    "train.global_batch=4",
    "train.warmup_steps=2",
    "train.weight_decay=0.1",
    "train.eval_rows=4",
    "data.lookahead=8",
    "packing.budget=256",
    "log.tensorboard=false",
    "log.predictions=0",
    "export=false",
)
UNEVALUATED = (
    "data.eval=none",
    *(one for one in COMMON if not one.startswith(("train.eval_rows", "data.lookahead", "packing.budget"))),
)
LAYOUTS = {
    "dp2": (2, ()),
    "dp2 bf16": (2, ("engine.precision=bf16",)),  # with fp32 masters
    "pp2": (2, ("parallel.pp=2",)),
    "tp2": (2, ("parallel.tp=2",)),
    "ep2": (2, ("parallel.ep=2",)),
}


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_leave_a_bad_step_out_and_nothing_of_it_stays(layout: str, pool: Pool, tmp_path: Path) -> None:
    size, overrides = LAYOUTS[layout]
    counted = 0 if layout == "tp2" else 1  # the loss of the other tensor-parallel rank is not looked at
    poison = {1: (1, "gradient"), 3: (1, "gradient"), 4: (counted, "loss")}
    found = pool.run(
        size,
        train_poisoned,
        [*COMMON, *overrides, f"run.dir={tmp_path}", "train.on_bad_step=skip"],
        poison,
        timeout=300.0,
    )
    for rank in found:
        for step, (before, after) in rank["states"].items():
            if step == 1:  # a state of zeros is made there, so that it can be saved
                assert after[1] == before[1] == 0
            elif step in poison:
                assert after == before, step
            else:
                assert after[0] != before[0] and after[1] == before[1] + 1, step
    causes = {1: "gradient", 3: "gradient", 4: "loss"}
    lines = logged(tmp_path)
    assert {line["step"]: line["skipped"] for line in lines if "skipped" in line} == causes
    assert {line["step"]: line["cause"] for line in lines if line.get("event") == "skip"} == causes
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["skipped_steps"] == {"gradient": 2, "loss": 1} and summary["steps"] == 5
    step = json.loads((tmp_path / "bad_steps" / "step_3.json").read_text())
    assert step["cause"] == "gradient" and step["grad_norm"] is None and step["loss"] > 0
    rows = step["rows"]
    replicas = 1 if layout in ("pp2", "tp2") else 2
    assert [row["rank"] for row in rows] == sorted(list(range(replicas)) * (4 // replicas))
    assert all(row["loss"] > 0 and row["samples"] for row in rows)
    samples = [sample["source"] for row in rows for sample in row["samples"]]
    assert len(samples) == len(set(samples)) and all(source.startswith("digits:train:") for source in samples)


@pytest.mark.slow
def test_a_run_goes_on_behind_bad_steps_to_the_bit(pool: Pool, tmp_path: Path) -> None:
    """The counts, too; and Adam's step count, which is behind the run's."""
    poison = {2: (0, "gradient"), 5: (1, "loss")}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    overrides = [*COMMON, "train.save_every=3", "train.on_bad_step=skip"]
    straight = pool.run(2, train_poisoned, [*overrides, f"run.dir={whole}"], poison, timeout=300.0)
    (resumed / "checkpoints").mkdir(parents=True)
    shutil.copytree(whole / "checkpoints" / "iter_3", resumed / "checkpoints" / "iter_3")
    later = pool.run(2, train_poisoned, [*overrides, f"run.dir={resumed}"], poison, timeout=300.0)
    for rank in range(2):
        assert sorted(later[rank]["states"]) == [4, 5]
        assert later[rank]["states"] == {step: straight[rank]["states"][step] for step in (4, 5)}
    summary = json.loads((resumed / "summary.json").read_text())
    assert summary["skipped_steps"] == {"gradient": 1, "loss": 1}


@pytest.mark.slow
def test_the_run_stops_after_so_many_bad_steps_in_a_row_and_is_saved(pool: Pool, tmp_path: Path) -> None:
    poison = {1: (1, "gradient"), 3: (0, "loss"), 4: (1, "gradient")}
    overrides = [*COMMON, f"run.dir={tmp_path}", "train.bad_steps=2"]
    with pytest.raises(PoolError, match=r"UserError: 2 bad steps in a row, the last one step 4: the loss is"):
        pool.run(2, train_poisoned, overrides, poison, timeout=300.0)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["iter_4"]
    found = pool.run(2, train_poisoned, overrides, {5: (1, "loss")}, timeout=300.0)
    assert sorted(found[0]["states"]) == [5] and found[0]["states"][5][0][1] == 1  # one update was made
    assert json.loads((tmp_path / "summary.json").read_text())["skipped_steps"] == {"gradient": 2, "loss": 2}


@pytest.mark.slow
def test_every_update_uses_the_rate_of_the_schedule(pool: Pool, tmp_path: Path) -> None:
    """A step that is left out is no update; a part has a rate of its own; a resumed run has more steps."""
    run = [
        *COMMON,
        "train.lr=1e-3",
        "train.min_lr=0",
        "train.lr_scale.vision=0.1",
        "train.on_bad_step=skip",
        f"run.dir={tmp_path}",
    ]
    poison = {2: (0, "gradient")}

    def cosine(update: int, steps: int) -> float:
        return 1e-3 * (1 + math.cos(math.pi * (update - 2) / (steps - 1))) / 2

    first = pool.run(1, train_recording_rates, run, poison, timeout=300.0)[0]
    wanted = [0.5e-3, 1e-3, cosine(3, 5), cosine(4, 5)]
    assert first == [pytest.approx([0.1 * rate, rate], rel=1e-9) for rate in wanted]
    later = pool.run(1, train_recording_rates, [*run, "train.steps=7"], poison, timeout=300.0)[0]
    assert later == [pytest.approx([0.1 * rate, rate], rel=1e-9) for rate in (cosine(5, 7), cosine(6, 7))]
    rates = [line["lr"] for line in logged(tmp_path) if "lr" in line]
    assert rates == pytest.approx([0.5e-3, 0.5e-3, *wanted[1:], cosine(5, 7), cosine(6, 7)], rel=1e-9)


@pytest.mark.slow
def test_one_step_trains(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(1, train_poisoned, [*COMMON, "train.steps=1", f"run.dir={tmp_path}"], {}, timeout=300.0)
    before, after = found[0]["states"][1]
    assert after[0] != before[0] and logged(tmp_path)[1]["lr"] > 0


def test_steps_without_labels_are_counted_and_no_spike_among_the_others(pool: Pool, tmp_path: Path) -> None:
    """Four of five rows have the weight 0: their steps change nothing, and the fifth's loss is no spike above zeros."""
    turns = [{"role": "user", "content": "Say a digit."}, {"role": "assistant", "content": "7"}]
    rows = [
        {"messages": turns, "weight": float(n % 10 > 7)} for n in range(30)
    ]  # each fifth step's two rows have labels
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = (
        *UNEVALUATED, f"data.train={tmp_path / 'rows.jsonl'}", "data.eval=none", "data.shuffle=false", "train.steps=null", "train.epochs=1",
        "train.global_batch=2", "packing.mode=none", "train.spike_after=2", "train.spike=1", "train.schedule=constant",
        f"run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    pool.run(2, rank_tasks.train, overrides, timeout=300.0)
    steps = [line for line in logged(tmp_path / "run") if "grad_norm" in line]
    labelled = [line for line in steps if line["labels"]]
    assert len(steps) == 15 and len(labelled) == 3
    assert all("skipped" not in line and line["loss"] > 1 for line in labelled)
    others = [line for line in steps if not line["labels"]]
    assert {(line["skipped"], line["loss"]) for line in others} == {("labels", None)}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["skipped_steps"] == {"labels": 12} and summary["final_loss"] == labelled[-1]["loss"]
    assert [line["lr"] / 3e-4 for line in labelled][:2] == pytest.approx(
        [labelled[0]["lr"] / 3e-4, 2 * labelled[0]["lr"] / 3e-4]
    )


def test_rows_without_any_label_are_refused_before_the_first_step(pool: Pool, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Say a digit."}, {"role": "assistant", "content": "7"}]
    rows = [{"messages": turns, "weight": 0} for _ in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = (f"data.train={tmp_path / 'rows.jsonl'}", "data.eval=none", f"run.dir={tmp_path / 'run'}")
    with pytest.raises(
        PoolError, match=r"data\.train: 9 rows have been looked at \(.*rows.jsonl:1, .*and none has a token to learn"
    ):
        pool.run(2, rank_tasks.train, [*UNEVALUATED, *data], timeout=300.0)
    assert not (tmp_path / "run" / "train.jsonl").exists()
