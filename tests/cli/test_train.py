"""`zoo train` from the first line it prints to the last file it writes; once more, further, from its own config."""

import json
from pathlib import Path

import pytest
from support.commands import STEPS, Ended, Zoo, events, logged, metrics, summary, text_row, weights, write_rows

ERASE = "\r\x1b[2K"


def times(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_what_a_run_prints(zoo: Zoo, finished: tuple[Path, Ended]) -> None:
    folder, done = finished
    printed, _, following = done.out.partition("\n\nNext:\n")
    assert f"  open {folder}/plots/predictions.png " in following and f" eval {folder} " in following
    lines = printed.splitlines()
    assert lines.pop(0) == "zoo: qwen3_omni tiny, random weights | trains on train.jsonl | numbers: zoo train --help"
    assert lines[0] == (
        "zoo: recipe qwen3_omni_sft | size tiny (given) | weights random | "
        f"evaluates on {zoo.data / 'heldout.jsonl'} | 1 rank (dp=1) | {folder}"
    )
    assert "trains on 11 rows of train.jsonl, evaluates on 2 of heldout.jsonl | 6 steps" in lines[1]
    assert " s from the command to the end of the first step: imports " in lines.pop(3)
    assert [line.split("  ")[0] for line in lines[2 : 2 + STEPS]] == [f"step {n}/{STEPS}" for n in range(1, 7)]
    assert lines[8].startswith("eval at step 6: loss ") and "image " in lines[8] and "text " in lines[8]
    assert lines.pop(9).startswith("answers to 2 held-out rows at step 6, ")
    assert [line.split()[0] in ("right", "wrong") for line in (lines.pop(9), lines.pop(9))] == [True, True]
    assert lines[9] == f"exported to {folder}/export (a Hugging Face folder)"
    assert lines.pop(10).endswith(f"{folder}/plots/predictions.png")
    assert lines[10].startswith("loss ") and lines[10].endswith(f"plot: {folder}/plots/loss.png")
    assert "\r" not in done.out and "\x1b" not in done.out
    assert done.err == ""  # nothing that torch, megatron-core or transformers have to say


def test_what_a_run_leaves(finished: tuple[Path, Ended]) -> None:
    folder, _ = finished
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints", "config.yaml", "env.json", "export", "plots", "predictions.jsonl", "summary.json", "tensorboard", "train.jsonl",
    ]  # fmt: skip
    steps = logged(folder)
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    wanted = {"loss", "grad_norm", "lr", "real_tokens", "pad_fraction", "step_ms", "moe_load_balancing_loss"}
    assert all(wanted <= record.keys() for record in steps)
    wanted_lines = [
        "start",
        "step",
        "startup",
        "step",
        "memory",
        *["step"] * (STEPS - 2),
        "save",
        "eval",
        "export",
        "end",
    ]
    assert events(folder) == wanted_lines
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["best", f"iter_{STEPS}"]
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert (folder / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")
    generation = json.loads((folder / "export" / "generation_config.json").read_text())
    tokens = json.loads((folder / "export" / "tokenizer.json").read_text())["added_tokens"]
    assert generation["eos_token_id"] == next(t["id"] for t in tokens if t["content"] == "<|im_end|>")
    assert f"| steps | {STEPS} |" in (folder / "export" / "README.md").read_text()
    assert json.loads((folder / "env.json").read_text())["packages"]["megatron-core"]
    ended = summary(folder)
    assert (ended["steps"], ended["total_steps"], ended["interrupted"]) == (STEPS, STEPS, False)
    assert ended["memory"]["host_gib"] > 0.1 and ended["memory"]["peak_gib"] is None
    assert ended["skipped_rows"] == {} and ended["final_loss"] == steps[-1]["loss"] < steps[0]["loss"]
    assert ended["metrics"]["by_kind"].keys() == {"image", "text"}


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is(zoo: Zoo, finished: tuple[Path, Ended]) -> None:
    folder, _ = finished
    before = times(folder)
    done = zoo.train(folder)
    assert (done.code, done.err) == (0, "")
    assert f"{folder} is finished: 6 steps are done and train.steps asks for 6. " in done.out
    assert "more train.steps" in done.out and "another run.dir" in done.out
    assert times(folder) == before


@pytest.mark.slow
def test_more_steps_go_on_from_a_finished_run(zoo: Zoo, copied: Path) -> None:
    changed = ("train.lr=1e-3", "run.accept_changes=[train.lr]", "log.tensorboard=false", "log.predictions=0")
    done = zoo.train(copied, f"train.steps={STEPS + 2}", *changed)
    assert done.code == 0, done
    assert f"resuming {copied}/checkpoints/iter_6 at step 6 of 8" in done.out
    assert [record["step"] for record in logged(copied)] == list(range(1, STEPS + 3))
    assert logged(copied)[-1]["lr"] < logged(copied)[-2]["lr"] < 1e-3  # the schedule is that of the recipe as it is now
    assert summary(copied)["steps"] == STEPS + 2
    assert sorted(path.name for path in (copied / "checkpoints").iterdir()) == ["best", "iter_6", "iter_8"]


def test_the_saved_config_repeats_the_run_to_the_bit(zoo: Zoo, finished: tuple[Path, Ended], tmp_path: Path) -> None:
    folder, _ = finished
    quiet = ("log.tensorboard=false", "log.predictions=0")
    done = zoo("train", f"recipe={folder}/config.yaml", f"run.dir={tmp_path}/again", *quiet)
    assert done.code == 0, done
    assert "size tiny (as resolved in " in done.out
    assert metrics(tmp_path / "again") == metrics(folder)
    assert weights(tmp_path / "again") == weights(folder)
    assert not (tmp_path / "again" / "tensorboard").exists()


@pytest.mark.slow
def test_another_models_run_folder_is_refused(zoo: Zoo, copied: Path) -> None:
    before = times(copied)
    key = "thinker_config.text_config.moe_intermediate_size"
    message = zoo.refused(*zoo.train_arguments(copied, f"model.arch.{key}=64"))
    assert (
        f"{copied}/checkpoints/iter_6 was saved under another recipe (model.arch.{key}: 96 there, 64 here)" in message
    )
    message = zoo.refused(*zoo.train_arguments(copied, "run.seed=1", "train.steps=9"))
    assert "run.seed: 1234 there, 1 here" in message and "use another run.dir" in message
    message = zoo.refused(*zoo.train_arguments(copied, "run.resume=false"))
    assert message.startswith(f"run.resume=false: {copied} holds iter_6 of an earlier run; give another run.dir")
    assert times(copied) == before


@pytest.mark.slow
def test_on_a_terminal_there_is_a_live_line(zoo: Zoo, tmp_path: Path) -> None:
    done = zoo.train(tmp_path / "run", "train.steps=3", "export=false", tty=True)
    assert done.code == 0, done
    drawn = [line.split(ERASE) for line in done.out.split("\r\n")]
    stays = [line[-1] for line in drawn]
    (first,) = [number for number, line in enumerate(stays) if "to the end of the first step" in line]
    assert [line[:9] for line in stays[first + 1 : first + 3]] == ["step 3/3 ", "eval at s"], stays
    gone = [text for line in drawn for text in line[:-1] if text]
    starts = [
        "checking the recipe", "importing", "checking memory", "joining", "reading rows", "building", "drawing",
        "first step",
    ]  # fmt: skip
    wanted = [*starts, "step 1/3  |", "step 2/3  |", "saving ...", "evaluating on 2 rows", "answering held-out"]
    seen = iter(gone)
    assert all(any(text.startswith(part) for text in seen) for part in wanted), gone  # in this order
    assert all(len(text) < 100 for text in gone)  # the terminal's width


@pytest.mark.slow
def test_ctrl_c_leaves_a_clean_line(zoo: Zoo, tmp_path: Path) -> None:
    run = zoo.start(*zoo.train_arguments(tmp_path / "run", "train.steps=5000", "export=false"), tty=True)
    run.until(lambda: "step 3/5000" in run.said())
    run.interrupt()
    done = run.ended()
    assert done.code == 130
    stays = [line.split(ERASE)[-1] for line in done.out.split("\r\n")]
    assert stays[-1] == ""
    assert not any(line.startswith(("step", "first step", "saving")) for line in stays), stays
    assert any(line.startswith("zoo: ending this step and saving") for line in stays)


@pytest.mark.parametrize("verb", [[], ["--help"], ["train", "--help"], ["list"], ["show", "recipe=qwen3_omni_sft"]])
def test_verbs_that_only_tell(zoo: Zoo, verb: list[str]) -> None:
    done = zoo(*verb)
    assert (done.code, done.err) == (0, "") and done.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "headline", "rows"),
    [
        ((), "no evaluation (data.eval=FILE gives one, and so does held_out: 0.05 in an entry of data.train)", 0),
        (("data.eval=none",), "no evaluation (data.eval=none)", 0),
        (("train.eval_every=2", "data.train[0].held_out=0.4"), "evaluates on 0.4 of ", None),
    ],
)
def test_own_data_alone(zoo: Zoo, tmp_path: Path, overrides: tuple[str, ...], headline: str, rows: int | None) -> None:
    """It is evaluated on nothing else: no metrics, no best checkpoint, no row of the bundled set."""
    folder = tmp_path / "run"
    mine = write_rows(tmp_path / "mine.jsonl", [text_row(number) for number in range(8)])
    how = ["data.eval=auto", "train.steps=4", "train.save_every=2", "export=false"]
    done = zoo.train(folder, f"data.train={mine}", *how, *overrides)
    assert (done.code, done.err) == (0, ""), done
    assert headline in done.out.splitlines()[1]
    assert "digits" not in done.out
    lines = map(json.loads, (folder / "train.jsonl").read_text(encoding="utf-8").splitlines())
    found = [line for line in lines if line.get("event") == "eval"]
    if rows == 0:
        assert "trains on 8 rows of mine.jsonl, no evaluation | 4 steps" in done.out.splitlines()[2]
        assert found == [] and summary(folder)["metrics"] == {} and "eval at" not in done.out
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["iter_2", "iter_4"]
    else:
        held_out = summary(folder)["metrics"]["rows"]
        assert f"trains on {8 - held_out} rows of mine.jsonl, evaluates on {held_out} of" in done.out
        assert 0 < held_out < 8 and [line["step"] for line in found] == [2, 4]
        assert (folder / "checkpoints" / "best").is_symlink()
    again = zoo.train(folder, f"data.train={mine}", *how, *overrides)
    assert "is finished" in again.out
