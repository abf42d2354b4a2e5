"""Resources that are used up: one sentence with numbers and settings, whole files, and the same command resumes afterwards."""

import contextlib
import json
import resource
from pathlib import Path

import pytest
from support.commands import Zoo, events, logged
from support.disks import Disk, mounted

from zoo.checkpoint import integrity
from zoo.config.locate import checkpoints


@pytest.mark.slow
def test_a_disk_that_is_too_small_for_what_is_kept(zoo: Zoo, tmp_path: Path) -> None:
    """Said before anything is built: three checkpoints are there while the third is written."""
    with mounted(tmp_path / "disk", "size=32m") as disk:
        folder = disk / "run"
        arguments = zoo.train_arguments(folder, "train.save_every=1", "log.tensorboard=false", "log.predictions=0")
        message = zoo.refused(*arguments)
        assert message.startswith(f"{folder}: a checkpoint takes about 21.1 MB, 3 of them are there at once")
        assert "the disk has 33.6 MB left" in message, message
        assert zoo(*arguments, "train.save=weights").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_fills_up_while_saving(zoo: Zoo, tmp_path: Path, ranks: int) -> None:
    """Somebody else fills it behind the first checkpoint; with more room the same command goes on from there."""
    with mounted(tmp_path / "disk", "size=100m") as disk:
        folder = disk / "run"
        saves = ("train.save_every=1", "train.steps=30", "log.tensorboard=false", "log.predictions=0")
        arguments = zoo.train_arguments(folder, f"nproc={ranks}", *saves)
        running = zoo.start(*arguments)
        running.until(lambda: bool(checkpoints(folder)))
        with contextlib.suppress(OSError), (disk / "other").open("wb", buffering=0) as file:
            while file.write(bytes(2**16)):
                pass
        done = running.ended()
        assert done.code == 2 and done.err.count("\n") == 1, done
        message = done.err
        assert f"{folder}" in message and " are free" in message, message
        assert "train.keep=2" in message and "a checkpoint takes about 21.1 MB" in message
        saved = checkpoints(folder)
        assert saved and not any(integrity.faults(path) for path in saved)
        lines = (folder / "train.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines]  # each is whole
        assert not (folder / "summary.json").exists()
        (disk / "other").unlink()
        done = zoo(*arguments)
        assert (done.code, done.err) == (0, ""), done
        assert "resuming" in done.out and [record["step"] for record in logged(folder)] == [*range(1, 31)]
        left = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert {"iter_29", "iter_30"} <= {*left} <= {"best", "iter_29", "iter_30"}, left


@pytest.mark.slow
def test_a_folder_that_can_only_be_read(zoo: Zoo, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "ro") as disk:
        message = zoo.refused(*zoo.train_arguments(disk / "run"))
        assert message == f"run.dir={disk}/run: no permission to write in {disk}; give another run.dir"
    with mounted(tmp_path / "run" / "checkpoints", "ro") as disk:  # found out at the first save
        message = zoo.refused(*zoo.train_arguments(tmp_path / "run", "nproc=2"))
        assert message.startswith(f"{disk}") and "its file system is read-only" in message, message


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_file_system_that_is_lost(zoo: Zoo, tmp_path: Path, ranks: int) -> None:
    """The run reports it; once the file system is back, the same command resumes from a whole checkpoint, to the same steps."""
    disk = Disk(tmp_path)
    try:
        folder = disk.mount / "run"
        saves = ("train.save_every=2", "train.steps=12", "log.tensorboard=false", "log.predictions=0")
        arguments = zoo.train_arguments(folder, f"nproc={ranks}", *saves)
        running = zoo.start(*arguments)
        running.until(lambda: len(checkpoints(folder)) > 1)
        disk.lose()
        done = running.ended()
        assert done.code == 2 and done.err.count("\n") == 1, done
        assert "its file system does not answer (Input/output error): the disk or its server is lost" in done.err
        disk.go()
        disk.come_back()
        newest = checkpoints(folder)[-1]
        done = zoo(*arguments)
        assert (done.code, done.err) == (0, "") and f"resuming {newest}" in done.out, done
        assert [record["step"] for record in logged(folder)] == list(range(1, 13))
    finally:
        disk.go()


def test_too_little_address_space_is_said_before_anything_hangs(zoo: Zoo, tmp_path: Path) -> None:
    limit = address_space(zoo.server.pid) + 2**30
    message = zoo.refused(*zoo.train_arguments(tmp_path / "run"), limits={"RLIMIT_AS": limit})
    assert message.startswith("the limit of a process's address space (ulimit -v) is ")
    assert "a rank takes 2.5 GB for its libraries and threads, beside the model: raise it" in message


@pytest.mark.slow
def test_used_up_host_memory_is_reported_with_the_planners_estimates(zoo: Zoo, tmp_path: Path) -> None:
    """The limit is set once the run has started, behind the check that would refuse it.

    The planner's process takes under 5 GB and the run 8: the limit lies well between.
    """
    folder = tmp_path / "run"
    overrides = [
        "packing.budget=16384",  # about 1.7 GB of activations
        "data.train=digits:train",
        "data.eval=digits:heldout",
        "train.global_batch=1",
        "train.steps=1000",
        "data.lookahead=1",
    ]
    running = zoo.start(*zoo.train_arguments(folder, *overrides))
    running.until(lambda: "start" in events(folder))
    limit = address_space(zoo.server.pid) + 2_200_000_000
    resource.prlimit(running.pid, resource.RLIMIT_AS, (limit, limit))
    message = zoo.refusal(running.ended())
    assert message.startswith("the host's memory is used up"), message
    assert "a rank was estimated to need " in message and "activations" in message
    assert "packing.budget=8192 would make it " in message and "engine.recompute=full would make it " in message
    assert not checkpoints(folder) and not (folder / "summary.json").exists()


def address_space(pid: int) -> int:
    """Bytes that a process has mapped."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
