"""`zoo show` of a run folder in every state that one can be in."""

import errno
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zoo.cli.main import main
from zoo.config.compose import load_recipe, save_recipe
from zoo.errors import UserError
from zoo.files import file_clock
from zoo.parallel.processes import birth, machine
from zoo.tools.runs.history import read_run
from zoo.tools.runs.status import RunStatus, describe, read_status
from zoo.watchdog.health import HEALTH
from zoo.watchdog.run_lock import RunLock, refuse_second

RANK = {
    "rank": 0, "state": "alive", "step": 9, "phase": "data", "phase_seconds": 1.0, "silent_seconds": 0.2, "stuck_seconds": 0.3,
    "place": "zoo/data/loading/loader.py:1", "waits_in": "", "machine": "here",
}  # fmt: skip


def folder_with(folder: Path, *more: dict[str, Any], steps: int = 10, ago: float = 5.0) -> Path:
    """A log of so many steps, two a second, the last one `ago` seconds old."""
    begin = time.time() - ago - steps / 2
    lines = [{"event": "start", "step": 0, "total_steps": 100, "time": begin}]
    lines += [
        {"step": n, "loss": 5.0 - n / 10, "real_tokens": 300, "step_ms": 400.0, "time": begin + n / 2}
        for n in range(1, steps + 1)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, *more]))
    os.utime(folder / "train.jsonl", (time.time() - ago, time.time() - ago))
    return folder


def healthy(folder: Path, age: float = 0.0, pid: int | None = None, **rank: Any) -> None:
    pid = pid or os.getpid()
    writer = {"machine": machine(), "pid": pid, "born": birth(pid) or "0"}
    found = {"time": time.time() - age, "every": 0.5, "writer": writer, "ranks": [{**RANK, **rank}]}
    (folder / HEALTH).write_text(json.dumps(found))
    os.utime(folder / HEALTH, (found["time"], found["time"]))


def refuse_to_open(monkeypatch: pytest.MonkeyPatch, number: int, which: Callable[[Path], bool]) -> None:
    """Files that `which` is true for can't be opened."""
    real = Path.open

    def refused(path: Path, *args: Any, **options: Any) -> Any:
        if which(path):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "open", refused)


def test_a_run_that_runs(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints" / "iter_8"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text("{}")
    more = [{"event": "skip", "step": 10}, {"event": "slow_step", "step": 10, "cause": "data"}]
    folder_with(tmp_path, *more, {"event": "rows_left_out", "step": 10, "counts": {"corrupt_media": 2}})
    (tmp_path / "train.jsonl").open("a").write('{"step": 11, "los')  # being written
    os.utime(tmp_path / "train.jsonl", (time.time() - 5, time.time() - 5))
    healthy(tmp_path)
    status = read_status(tmp_path)
    assert (status.state, status.step, status.total_steps, status.save_step) == ("running", 10, 100, 8)
    assert status.steps_per_second == pytest.approx(2.0, rel=1e-3)
    assert status.tokens_per_second == pytest.approx(600.0, rel=1e-3)
    assert status.eta_seconds == pytest.approx(45.0, rel=1e-3)
    assert (status.skipped_steps, status.slow_steps, status.bad_rows) == (1, {"data": 1}, {"corrupt_media": 2})
    shown = describe(status)
    assert (
        "state      running\nstep       10 of 100, 0:05 ago, 0:45 to go\nspeed      2 steps/s, 600 real tokens/s\n"
        in shown
    )
    assert "loss       4.0000, 4.4000 on average over the last 9 steps\n" in shown
    assert "1 of 1 ranks alive, 1 steps skipped, slow steps: 1 by data, rows left out: 2 corrupt_media" in shown


def test_states(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")  # it has only begun
    status = read_status(tmp_path)
    assert (status.state, status.step, status.loss) == ("gone", 0, None)
    assert "step       0 of ?\nlast save  none yet" in describe(status)
    folder_with(tmp_path)
    assert read_status(tmp_path).state == "gone"
    healthy(tmp_path, stuck_seconds=90.0)
    assert read_status(tmp_path).state == "stalled"
    healthy(tmp_path, pid=2**22 + 1)
    assert read_status(tmp_path).state == "gone"
    assert "rank 0: after step 9, data at zoo/data/loading/loader.py:1 for 1 s" in describe(read_status(tmp_path))
    for reason in ("finished", "out of time", "interrupted", "preempted"):
        folder_with(tmp_path, {"event": "end", "step": 10, "reason": reason, "time": time.time()})
        assert read_status(tmp_path).state == reason
    healthy(tmp_path, age=-10.0)  # started again, before it has said so
    assert read_status(tmp_path).state == "starting"
    healthy(tmp_path, age=30.0)
    folder_with(tmp_path, {"event": "end", "step": 10, "reason": "died", "message": "rank 1 died", "time": time.time()})
    assert describe(read_status(tmp_path)).splitlines()[1] == "state      failed: rank 1 died"


def test_a_run_whose_health_is_not_written_yet(tmp_path: Path) -> None:
    """The run that holds the folder speaks for it: before its log, in the first moment after, and started again."""
    folder_with(tmp_path)
    with RunLock(tmp_path):
        assert read_status(tmp_path).state == "starting"  # the log is of an earlier one, which was killed
        folder_with(tmp_path, steps=0, ago=-1.0)
        assert read_status(tmp_path).state == "running"
        folder_with(tmp_path, {"event": "end", "step": 10, "reason": "finished", "time": time.time() + 2}, ago=-1.0)
        assert read_status(tmp_path).state == "finished"
        (tmp_path / "train.jsonl").write_text("")
        assert read_status(tmp_path).state == "starting"
    assert read_status(tmp_path).state == "gone"


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, said in ((tmp_path, "is no run folder: it holds no train.jsonl"), (tmp_path / "x", "no such folder")):
        assert main(["show", str(path)]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"zoo: error: {path}") and said in err and err.count("\n") == 1
    assert main(["show", "qwen3_omni_sft"]) == 0
    assert "recipe: qwen3_omni_sft" in capsys.readouterr().out


def test_json_has_the_total_that_the_run_has_corrected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_with(tmp_path, {"event": "total_steps", "step": 10, "total_steps": 120})
    assert main(["show", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["total_steps"]) == (10, 120)


@pytest.mark.parametrize("ahead", [3600.0, 3.0, -3600.0])
def test_a_run_resumed_on_a_machine_with_another_clock(
    ahead: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first machine's clock was `ahead` of this one's: the run starts, runs and ends as any, and no time is negative."""
    run, now = tmp_path / "run", time.time()
    run.mkdir()
    resolved = load_recipe("qwen3_vl_sft", ["hardware=cpu", f"run.dir={run}"])
    save_recipe(resolved, run / "config.yaml")
    folder_with(run)
    lines = [json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()]
    lines = [{**line, "time": line["time"] + ahead} for line in lines]
    lines.append({"event": "end", "step": 10, "reason": "interrupted", "time": now - 5 + ahead})
    resumed = [{"event": "resume", "step": 10, "total_steps": 100, "time": now}]
    resumed += [{"step": n, "loss": 4.0, "step_ms": 400.0, "time": now + (n - 10) / 2} for n in (11, 12)]

    def shown(state: str) -> RunStatus:
        for arguments in (["show", str(run)], ["list", "runs", str(tmp_path)], ["report", str(run)]):
            assert main(arguments) == 0
        printed = capsys.readouterr().out + (run / "report.html").read_text()
        assert state in printed and "stalled" not in printed and not re.search(r"[\s>]-\d+:\d\d", printed)
        assert 0 < (read_run(run).seconds or 0.0) < 4000
        return read_status(run)

    def write() -> None:
        (run / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    write()
    os.utime(run / "train.jsonl", (now - 5, now - 5))
    assert shown("interrupted").state == "interrupted"
    with RunLock(run):
        assert shown("starting").state == "starting"
        lines += resumed
        write()
        healthy(run)
        status = shown("running")
        assert status.state == "running" and status.last_step_age is not None and 0 <= status.last_step_age < 60
        assert status.eta_seconds is not None and 0 < status.eta_seconds < 600
    lines.append({"event": "end", "step": 12, "reason": "finished", "time": now + 1})
    write()
    (run / HEALTH).unlink()
    assert shown("finished").state == "finished"


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_a_run_in_a_folder_that_a_reader_can_t_write_to(
    ahead: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file system's clock is not to be had then; on the run's own machine the times that the run wrote say the same."""
    refuse_to_open(monkeypatch, errno.EACCES, lambda path: path.name.startswith(".clock."))
    saved = folder_with(tmp_path) / "checkpoints" / "iter_8"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text("{}")
    healthy(tmp_path)
    now = time.time() + ahead  # of the file system
    for path, age in ((tmp_path / HEALTH, 0.0), (tmp_path / "train.jsonl", 5.0), (saved, 6.0)):
        os.utime(path, (now - age, now - age))
    status = read_status(tmp_path)
    assert status.state == "running"
    assert status.last_step_age == pytest.approx(5.0, abs=2) and status.save_age == pytest.approx(6.0, abs=2)
    with RunLock(tmp_path), pytest.raises(UserError, match=r"last sign of life is \d+ s old"):
        refuse_second(tmp_path)
    assert main(["show", str(tmp_path)]) == 0 and "stalled" not in capsys.readouterr().out


def test_the_clock_of_a_folder_is_asked_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that can't be written to is on the device of one that can."""
    (tmp_path / "run").mkdir()
    refuse_to_open(monkeypatch, errno.EROFS, lambda path: path.parent.name == "run")
    monkeypatch.setattr(time, "time", lambda: 1.0)
    assert file_clock(tmp_path / "run") > 1e9
    assert not list(tmp_path.rglob(".clock*"))
