"""Ctrl-C at every stage of a run, and what the same command does afterwards."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.commands import STEPS, Ended, Zoo, events, logged, metrics, python, summary, weights


@pytest.mark.slow
def test_while_training_it_saves_and_the_same_command_goes_on(
    zoo: Zoo, finished: tuple[Path, Ended], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    running = zoo.start_training(folder)
    running.until(lambda: "step" in events(folder))
    running.interrupt()
    done = running.ended()
    at = summary(folder)["steps"]
    assert done.code == 130 and 0 < at < STEPS
    assert done.err == "zoo: ending this step and saving; Ctrl-C again stops at once, without saving\n"
    assert done.out.splitlines()[-1] == (
        f"stopped at step {at} of 6, saved in {folder}/checkpoints/iter_{at}; run the same command again to train on"
    )
    assert summary(folder)["interrupted"] is True
    assert not (folder / "export").exists()

    done = zoo.train(folder)
    assert done.code == 0, done
    assert f"resuming {folder}/checkpoints/iter_{at} at step {at} of 6" in done.out
    assert metrics(folder) == metrics(finished[0])  # to the bit
    assert weights(folder) == weights(finished[0])
    assert (summary(folder)["interrupted"], summary(folder)["steps"]) == (False, STEPS)


@pytest.mark.parametrize("stage", ["recipe", "start"])
def test_before_the_first_step_nothing_is_written(zoo: Zoo, tmp_path: Path, stage: str) -> None:
    folder = tmp_path / "run"
    running = zoo.start_training(folder)
    running.until(lambda: "zoo: recipe" in running.said())
    if stage == "start":  # torch.distributed has started its threads
        running.until(lambda: len(os.listdir(f"/proc/{running.pid}/task")) > 1)
    running.interrupt()
    done = running.ended()
    assert (done.code, done.err) == (130, "zoo: interrupted\n")
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "reached"),
    [
        ("evaluation", lambda folder: events(folder)[-1:] == ["save"]),
        ("export", lambda folder: (folder / ".export.partial").exists()),
    ],
)
def test_after_the_last_step_only_the_rest_is_left_to_do(
    zoo: Zoo, tmp_path: Path, stage: str, reached: Callable[[Path], bool]
) -> None:
    for attempt in range(5):  # on a busy machine the stage may be over before the signal arrives
        folder = tmp_path / f"run{attempt}"
        running = zoo.start_training(folder, "train.steps=1")
        running.until(partial(reached_or_over, reached, folder))
        running.interrupt()
        done = running.ended()
        if not (folder / "export").exists():
            break
    assert done.code == 130, (stage, done)
    assert done.out.splitlines()[-1].endswith("run the same command again to evaluate and export")
    assert (summary(folder)["interrupted"], summary(folder)["export"]) == (True, None)
    assert not (folder / "export").exists() and not (folder / ".export.partial").exists()

    done = zoo.train(folder, "train.steps=1")
    assert done.code == 0 and "step 1/1" not in done.out
    assert (folder / "export" / "config.json").is_file()
    assert len(logged(folder)) == 1
    assert (summary(folder)["interrupted"], summary(folder)["final_loss"]) == (False, logged(folder)[0]["loss"])


@pytest.mark.slow
def test_a_second_one_stops_at_once(zoo: Zoo, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    running = zoo.start_training(folder, "train.steps=500")
    running.until(lambda: "step" in events(folder))
    running.interrupt()
    running.until(lambda: "Ctrl-C again" in running.said())
    running.interrupt()
    assert running.ended().code == 130
    assert not (folder / "summary.json").exists()
    assert not list((folder / "checkpoints").glob("iter_*"))


@pytest.mark.slow
def test_decoding_workers_end_with_the_run(zoo: Zoo, tmp_path: Path) -> None:
    """Also where it is stopped at once."""
    folder = tmp_path / "run"
    running = zoo.start_training(folder, "train.steps=500", "data.workers=1", "data.cache_mb=0")
    running.until(lambda: len(events(folder)) > 3)
    workers = children(running.pid)
    assert len(workers) == 1
    running.interrupt()
    running.until(lambda: "Ctrl-C again" in running.said())
    running.interrupt()
    assert running.ended().code == 130
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def reached_or_over(reached: Callable[[Path], bool], folder: Path) -> bool:
    return reached(folder) or (folder / "export").exists()


def children(parent: int) -> list[int]:
    """Decoding workers of a process, and of its children."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            above = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
        except (OSError, IndexError, ValueError):
            continue
        if b"zoo.data.media.decoding_process" in command and above == parent:
            found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused_and_changes_nothing(zoo: Zoo, tmp_path: Path) -> None:
    """While the first trains; a killed one's folder is taken over by the same command, which says so."""
    folder = tmp_path / "run"
    running = zoo.start_training(folder, "train.steps=2000", "train.save_every=2")
    running.until(lambda: (folder / "checkpoints").is_dir() and "step" in events(folder))
    before = [line for line in (folder / "train.jsonl").read_text().splitlines()]
    second = in_own_process(zoo, folder, "train.steps=2000", "nproc=2")
    assert second.returncode == 2 and second.stderr.count("zoo: error") == 1, second
    assert f"run.dir={folder}: process {running.pid} on " in second.stderr
    assert (folder / "train.jsonl").read_text().splitlines()[: len(before)] == before
    os.kill(running.pid, signal.SIGKILL)
    running.ended()
    done = zoo.train(folder, "train.steps=4")
    assert done.code == 0 and f"process {running.pid} on " in done.out and "taken over" in done.out
    assert not (folder / "run.lock").exists()


def in_own_process(zoo: Zoo, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A command beside another one that runs: the server of commands has one at a time."""
    return python("-m", "zoo", *zoo.train_arguments(folder, *overrides), cwd=zoo.folder, timeout=120)
