"""A loss that jumps and numbers that overflow, as users meet them: reported, recorded, shown by zoo inspect, left behind."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import Zoo, logged, summary, text_row, write_rows

pytestmark = pytest.mark.slow

SURPRISE = "zebra quartz 8 7 6 5 fjord vex"


def surprising(folder: Path) -> Path:
    """Rows that are all the same, with one among them that nothing has prepared for."""
    rows = [text_row(7) for _ in range(400)]
    rows[300] = {"kind": "text", "messages": [
        {"role": "user", "content": "Say."}, {"role": "assistant", "content": SURPRISE}]}  # fmt: skip
    return write_rows(folder / "rows.jsonl", rows)


def spiky(data: Path, *overrides: str) -> list[str]:
    return [
        f"data.train={data}", "data.shuffle=false", "data.lookahead=1", "packing.budget=64", "train.steps=130",
        "train.lr=3e-3", "train.spike_after=50", "data.blank_answers=0", "export=false", "train.log_every=100", *overrides,
    ]  # fmt: skip


def test_a_spike_is_left_out_and_its_rows_are_shown_again(zoo: Zoo, tmp_path: Path) -> None:
    """On two ranks: one of them has the row."""
    data, folder = surprising(tmp_path), tmp_path / "run"
    done = zoo.train(folder, *spiky(data, "nproc=2"))
    assert (done.code, done.err) == (0, ""), done
    bad = [record for record in logged(folder) if "skipped" in record]
    assert [record["skipped"] for record in bad] == ["spike"], bad
    step = bad[0]["step"]
    assert summary(folder)["skipped_steps"] == {"spike": 1}
    file = folder / "bad_steps" / f"step_{step}.json"
    assert f"step {step} is not applied: the loss is " in done.out and f"`zoo inspect {file}` shows" in done.out
    assert "steps not applied: 1 (spike); " in done.out

    details: dict[str, Any] = json.loads(file.read_text())
    worst = max(details["rows"], key=lambda row: row["loss"])
    sources = [sample["source"] for sample in worst["samples"]]
    assert f"{data}:301" in sources
    others = [row["loss"] for row in details["rows"] if row is not worst]
    assert others and all(loss < worst["loss"] for loss in others)
    assert {row["rank"] for row in details["rows"]} == {0, 1}

    shown = zoo("inspect", str(folder), f"step={step}", "samples=20")
    assert (shown.code, shown.err) == (0, ""), shown
    assert shown.out.startswith(f"step {step} was not applied: the loss is ") and f"{data}:301" in shown.out
    page = (folder / "inspect" / f"step_{step}" / "rows.html").read_text()
    assert SURPRISE in page and f"{data}:301" in page and "rank 1, loss " in page
    found = json.loads(zoo("inspect", str(file), "samples=20", "--json", f"out={tmp_path / 'out'}").out)
    assert found["step"]["rows"] == details["rows"] and (tmp_path / "out" / "rows.png").stat().st_size > 10_000

    missing = zoo.refused("inspect", str(folder), "step=999")
    assert missing.endswith(f"step_999.json: no such file; {folder}/bad_steps has step_{step}.json")
    data.write_text("\n".join(reversed(data.read_text().splitlines())) + "\n")
    changed = zoo.refused("inspect", str(file), "samples=20")
    assert "the data are not those of the run any more: no packed row has " in changed
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:200]) + "\n")
    assert "data had 400 rows" in zoo.refused("inspect", str(file), "samples=20")


def test_a_spike_can_be_switched_off(zoo: Zoo, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    given = [one for one in spiky(surprising(tmp_path), "train.spike=0", "train.steps=110") if "spike_after" not in one]
    assert zoo.train(folder, *given).code == 0
    assert summary(folder)["skipped_steps"] == {} and not (folder / "bad_steps").exists()


def test_numbers_that_overflow_stop_the_run_which_is_saved(zoo: Zoo, tmp_path: Path) -> None:
    """The first update takes the decoder's weights to 1e8; what follows is not finite."""
    folder = tmp_path / "run"
    overrides = ["nproc=2", "train.lr=100", "train.lr_scale={language: 1e6}", "train.warmup_steps=0"]
    stopping = [*overrides, "train.on_bad_step=stop", "train.bad_steps=2"]
    message = zoo.refused(*zoo.train_arguments(folder, *stopping))
    assert message.startswith("2 bad steps in a row, the last one step 3: the loss is ")
    assert f"saved in {folder}/checkpoints/iter_3; " in message and "train.on_bad_step=skip" in message
    records = logged(folder)
    assert [record.get("skipped") in ("loss", "gradient") for record in records] == [False, True, True]
    for record in records[1:]:  # JSON has no word for nan
        assert record["loss" if record["skipped"] == "loss" else "grad_norm"] is None
    again = zoo.refused(*zoo.train_arguments(folder, *stopping))
    assert again.startswith("2 bad steps in a row, the last one step 5: ")

    done = zoo.train(folder, *overrides, "train.on_bad_step=skip", "export=false")
    assert done.code == 0, done
    assert sum(summary(folder)["skipped_steps"].values()) == 5
    assert (folder / "plots" / "loss.png").exists()


def test_a_level_that_shifts_is_left_out_no_longer_than_the_recipe_says(zoo: Zoo, tmp_path: Path) -> None:
    """From the middle on all rows are of another kind. The run stops there, is resumed, and takes their level."""
    other = {"kind": "text", "messages": [
        {"role": "user", "content": "Say."}, {"role": "assistant", "content": SURPRISE}]}  # fmt: skip
    data, folder = write_rows(tmp_path / "rows.jsonl", [text_row(7)] * 300 + [other] * 300), tmp_path / "run"
    overrides = spiky(data, "train.on_bad_step=skip", "train.skip_limit=6", "train.steps=100")
    message = zoo.refused(*zoo.train_arguments(folder, *overrides))
    assert message.startswith("6 bad steps in a row, the last one step ") and "train.on_new_level=take" in message
    done = zoo.train(folder, *overrides, "train.on_new_level=take")
    assert (done.code, done.err) == (0, ""), done
    assert "6 spikes in a row up to step " in done.out
    steps = logged(folder)
    left_out = [record["step"] for record in steps if "skipped" in record]
    assert len(left_out) == 12 and left_out == list(range(left_out[0], left_out[0] + 12))
    before, after = steps[left_out[0] - 2]["loss"], steps[left_out[-1]]["loss"]
    assert after > before + 1 and steps[-1]["loss"] < after - 1, "it learns what is new"
