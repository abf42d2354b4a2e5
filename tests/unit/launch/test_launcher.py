"""Ranks as child processes: all well, one failing, interrupted; with small programs in the worker's place."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from zoo.config.compose import load_recipe
from zoo.config.schema import Recipe
from zoo.errors import ConfigError, UserError
from zoo.launch import launcher, prepare, rank_group, rank_main
from zoo.launch.launcher import WorkerError
from zoo.launch.prepare import world_size
from zoo.launch.rank_group import run_ranks
from zoo.logging.result import TrainResult
from zoo.planner import plan_process

pytestmark = pytest.mark.usefixtures("signals_arrive")


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "gpu_count", lambda: 0)
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def program(text: str) -> list[str]:
    head = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
    return [sys.executable, "-c", head + textwrap.dedent(text)]


def test_all_ranks_end_well_and_know_their_place(tmp_path: Path) -> None:
    text = f"""
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
        with open({str(tmp_path)!r} + f"/{{rank}}", "w") as file:
            print(*(os.environ[name] for name in names), file=file)
    """
    assert run_ranks(program(text), 3, threads=5) == 0
    places = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [place[:4] for place in places] == [[str(rank), str(rank), "3", "127.0.0.1"] for rank in range(3)]
    assert len({place[4] for place in places}) == 1
    assert {place[5] for place in places} == {"5"}


def test_only_rank_0_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(program("print('out', rank); print('err', rank, file=sys.stderr)"), 2) == 0
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("out 0\n", "err 0\n")


def test_a_failing_rank_takes_the_others_with_it(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "_OTHERS_SECONDS", 1.0)
    text = f"""
        open({str(tmp_path)!r} + f"/{{os.getpid()}}", "w").close()
        if rank == 1:
            print("what went wrong", file=sys.stderr)
            sys.exit(3)
        time.sleep(60)
    """
    start = time.monotonic()
    assert run_ranks(program(text), 3) == 3
    assert time.monotonic() - start < 10
    assert "zoo: rank 1 failed with exit code 3; its last lines:\n  what went wrong\n" in capfd.readouterr().err
    for pid in (int(path.name) for path in tmp_path.iterdir()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_rank_that_will_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "_OTHERS_SECONDS", 0.3)
    text = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(0.5 if rank else 60)
        sys.exit(rank)
    """
    start = time.monotonic()
    assert run_ranks(program(text), 2) == 1
    assert time.monotonic() - start < 10


def test_the_same_mistake_on_all_ranks_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    text = """
        time.sleep(0 if rank else 0.3)
        with open(os.environ["ZOO_FAILURE_LOG"], "a") as file:
            file.write("zoo: error: the mistake\\n")
        sys.exit(2)
    """
    assert run_ranks(program(text), 2) == 2
    assert capfd.readouterr().err == "zoo: error: the mistake\n"


def test_a_mistake_that_one_rank_finds_is_told_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    text = """
        if rank == 1:
            print("a warning", "zoo: error: row 17", sep="\\n", file=sys.stderr)
            sys.exit(2)
        time.sleep(0.3)
        sys.exit(1)  # the rank that was dragged along
    """
    assert run_ranks(program(text), 2) == 2
    assert capfd.readouterr().err == "zoo: error: row 17\n"


def test_a_rank_that_is_killed_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(program("if rank == 0: os.kill(os.getpid(), signal.SIGKILL)"), 2) == 128 + signal.SIGKILL
    assert capfd.readouterr().err == "zoo: rank 0 was ended by SIGKILL (not by the kernel for want of memory)\n"


COUNTING = """
    came = []
    def saved(number, frame):
        came.append(number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, saved)
    open(sys.argv[1] + f"/ready{rank}", "w").close()
    while not came:
        time.sleep(0.02)
    time.sleep(0.5)  # time in which a second SIGINT would show
    with open(sys.argv[1] + f"/came{rank}", "w") as file:
        print(*(int(number) for number in came), file=file)
    sys.exit(130 if came[0] == signal.SIGINT else 75)
"""


def when_ready(folder: Path, ranks: int, *signals: int) -> threading.Thread:
    """Send the signals to this process once all ranks are ready."""

    def send() -> None:
        while len(list(folder.glob("ready*"))) < ranks:
            time.sleep(0.02)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGHUP, 75), (signal.SIGQUIT, 75)],
)
def test_a_signal_reaches_every_rank_once_and_is_waited_for(number: int, code: int, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    thread = when_ready(tmp_path, 2, number)
    assert run_ranks([*program(COUNTING), str(tmp_path)], 2) == code
    thread.join()
    assert [(tmp_path / f"came{rank}").read_text() for rank in range(2)] == [f"{int(number)}\n"] * 2
    assert signal.getsignal(number) == before


def test_a_ctrl_c_of_the_terminal_reaches_a_rank_once(tmp_path: Path) -> None:
    """A terminal signals the whole foreground process group: the ranks must not be in it."""
    code = "import sys; from zoo.launch.rank_group import run_ranks; sys.exit(run_ranks(sys.argv[1:], 2))"
    parent = subprocess.Popen([sys.executable, "-c", code, *program(COUNTING), str(tmp_path)], start_new_session=True)
    while len(list(tmp_path.glob("ready*"))) < 2:
        time.sleep(0.02)
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.wait(timeout=20) == 130
    assert [(tmp_path / f"came{rank}").read_text() for rank in range(2)] == [f"{int(signal.SIGINT)}\n"] * 2


def test_a_second_interrupt_kills(tmp_path: Path) -> None:
    text = """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        open(sys.argv[1] + f"/ready{rank}", "w").close()
        time.sleep(60)
    """
    start = time.monotonic()
    thread = when_ready(tmp_path, 2, signal.SIGINT, signal.SIGINT)
    assert run_ranks([*program(text), str(tmp_path)], 2) == 130
    thread.join()
    assert time.monotonic() - start < 10


# --- launch itself


def recipe_in(folder: Path, *overrides: str) -> Recipe:
    return load_recipe("qwen3_omni_sft", ["size=tiny", "train.steps=2", f"run.dir={folder}", *overrides])


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, summary: dict[str, object], code: int) -> None:
    """Ranks that only leave `summary` in the run folder."""

    def train(recipe: Recipe, messages: list[str]) -> int:
        assert recipe.run.dir == str(folder)
        if summary:
            (folder / "summary.json").write_text(json.dumps(summary))
            (folder / "train.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n')
        return code

    @contextmanager
    def start(recipe: Recipe, ranks: int, callbacks: Sequence[object]) -> Iterator[object]:
        assert ranks == 2
        yield train

    monkeypatch.setattr(launcher, "waiting_ranks", start)


def test_launch_reads_the_result_of_its_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    summary = {"steps": 2, "checkpoint": "c", "metrics": {"loss": 1.0}, "interrupted": False}
    stand_in(monkeypatch, tmp_path, summary, 0)
    result = launcher.launch(recipe_in(tmp_path, "nproc=2"))
    assert result == TrainResult(
        steps=2, losses=[2.0, 1.5], checkpoint="c", metrics={"loss": 1.0}, run_dir=str(tmp_path)
    )


def test_launch_when_ranks_are_interrupted_or_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, tmp_path, {}, 130)
    with pytest.raises(KeyboardInterrupt):
        launcher.launch(recipe_in(tmp_path, "nproc=2"))
    stand_in(monkeypatch, tmp_path, {"steps": 2, "interrupted": True}, 130)
    assert launcher.launch(recipe_in(tmp_path, "nproc=2")).interrupted
    stand_in(monkeypatch, tmp_path, {}, 5)
    with pytest.raises(WorkerError) as caught:
        launcher.launch(recipe_in(tmp_path, "nproc=2"))
    assert caught.value.code == 5


RANK = """
import json, os, sys
from pathlib import Path
from zoo.launch.rank_main import _planned
folder, config, asked = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[sys.argv.index("--asked") + 1]
(folder / f"began{os.environ['RANK']}").write_text(str(os.getpid()))
recipe = _planned(config)
(folder / f"recipe{os.environ['RANK']}").write_text(json.dumps([recipe.parallel.tp, recipe.parallel.plan, os.path.exists(asked)]))
"""


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[int]]:
    """Ranks that wait for their recipe and leave what it says; the process ids of two that have begun."""
    start = launcher.module_command

    def command(module: str, *arguments: str) -> list[str]:
        assert start(module)[-1] == "zoo.launch.rank_main"
        return [sys.executable, "-c", RANK, str(tmp_path), *arguments]

    def pids() -> list[int]:
        while len(files := [path for path in tmp_path.glob("began*") if path.read_text()]) < 2:
            time.sleep(0.01)
        return [int(path.read_text()) for path in files]

    monkeypatch.setattr(launcher, "module_command", command)
    return pids


def test_ranks_begin_before_their_recipe_is_planned(
    began: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []

    def choose(recipe: Recipe, ranks: int) -> Recipe:
        assert recipe.parallel.plan and began()
        return recipe.replace({"parallel.plan": [], "parallel.tp": 2})

    monkeypatch.setattr(plan_process, "_choose", choose)
    (tmp_path / "summary.json").write_text('{"interrupted": false}')
    recipe = recipe_in(tmp_path, "nproc=2", "parallel.plan=[tp]")
    launcher.launch(recipe, announce=lambda planned, ranks: seen.append((planned.parallel.tp, ranks)))
    assert seen == [(2, 2)]
    for rank in range(2):
        assert json.loads((tmp_path / f"recipe{rank}").read_text()) == [2, [], True]


@pytest.mark.parametrize("mistake", [UserError("nothing fits"), KeyboardInterrupt()], ids=repr)
def test_ranks_that_wait_end_where_nothing_is_planned(
    began: Callable[[], list[int]], mistake: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pids: list[int] = []

    def choose(recipe: Recipe, ranks: int) -> Recipe:
        pids.extend(began())
        raise mistake

    monkeypatch.setattr(plan_process, "_choose", choose)
    with pytest.raises(type(mistake)):
        launcher.launch(recipe_in(tmp_path, "nproc=2", "parallel.plan=[tp]"))
    assert len(pids) == 2 and all(map(ended, pids))


@pytest.mark.parametrize("gpus", [0, 2])
def test_what_is_done_while_another_process_plans(gpus: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[int] = []
    monkeypatch.setattr(plan_process, "gpu_count", lambda: gpus)
    recipe = recipe_in(tmp_path, "parallel.plan=[tp]", "hardware=2xh100", "machine.host_memory_gb=64")
    for here in (False, True):
        planned = plan_process.planned(recipe, 2, in_process=here, meanwhile=lambda: calls.append(1))
        assert planned.parallel.plan == [] and planned.parallel.tp == 1
    plan_process.planned(planned, 2, meanwhile=lambda: calls.append(1))
    assert len(calls) == 3


def test_ranks_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world_size(Recipe()) == 1
    assert world_size(Recipe(nproc=3)) == 3
    monkeypatch.setattr(prepare, "gpu_count", lambda: 4)
    assert world_size(Recipe()) == 4
    with pytest.raises(ConfigError, match=r"^nproc=5: a rank needs a GPU of its own and 4 can be seen"):
        world_size(Recipe(nproc=5))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert world_size(Recipe(nproc=2)) == 16


def test_a_folder_in_which_no_run_has_ended(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no summary\.json"):
        TrainResult.from_run_dir(tmp_path)


def test_losses_of_a_resumed_run(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text(
        "\n".join(json.dumps({"step": s, "loss": v}) for s, v in [(1, 3.0), (2, 2.0), (2, 2.5), (3, 1.0)])
    )
    result = TrainResult.from_run_dir(tmp_path)
    assert (result.steps, result.losses, result.interrupted) == (3, [3.0, 2.5, 1.0], False)


# --- the worker


def test_the_worker_maps_what_happens_to_exit_codes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from types import ModuleType

    from zoo.config.compose import save_recipe

    recipe = recipe_in(tmp_path)
    save_recipe(recipe, tmp_path / "config.yaml")
    loop = ModuleType("zoo.training.trainer")
    monkeypatch.setitem(sys.modules, "zoo.training.trainer", loop)

    def outcome(what: TrainResult | BaseException) -> int:
        def run_rank(given: Recipe, callbacks: list[object]) -> TrainResult:
            assert given == recipe and callbacks == []
            if isinstance(what, BaseException):
                raise what
            return what

        loop.run_rank = run_rank  # type: ignore[attr-defined]
        return rank_main.main([str(tmp_path / "config.yaml")])

    done = TrainResult(steps=1, losses=[], checkpoint=None, run_dir="x")
    assert outcome(done) == 0
    assert outcome(TrainResult(**{**vars(done), "interrupted": True})) == 130
    assert outcome(KeyboardInterrupt()) == 130
    assert outcome(UserError("one sentence")) == 2
    assert capsys.readouterr().err == "zoo: error: one sentence\n"
    assert outcome(FileNotFoundError(2, "No such file or directory", "rows.jsonl")) == 2
    assert capsys.readouterr().err == "zoo: error: rows.jsonl: no such file or folder\n"
    assert outcome(ZeroDivisionError()) == 1
    assert capsys.readouterr().err.endswith("ZeroDivisionError\n")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("deaf", [False, True], ids=["in Python", "waiting for the store"])
def test_ranks_end_when_the_launcher_is_killed(tmp_path: Path, deaf: bool) -> None:
    text = """
        from datetime import timedelta
        from torch.distributed import TCPStore
        from zoo.parallel import processes
        from zoo.parallel.signals import interrupts
        processes._POLL_SECONDS, processes._DEAF_SECONDS = 0.05, 0.5
        processes.end_with_parent()
        with interrupts():
            open(sys.argv[1] + f"/ready{rank}", "w").write(str(os.getpid()))
            if sys.argv[2] == "True":
                TCPStore("127.0.0.1", 9, is_master=False, timeout=timedelta(seconds=60))
            time.sleep(60)
    """
    code = "import sys; from zoo.launch.rank_group import run_ranks; sys.exit(run_ranks(sys.argv[1:], 2))"
    parent = subprocess.Popen([sys.executable, "-c", code, *program(text), str(tmp_path), str(deaf)])
    while len([path for path in tmp_path.glob("ready*") if path.read_text()]) < 2:
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    for path in tmp_path.glob("ready*"):
        assert ended(int(path.read_text()))


def ended(pid: int, seconds: float = 10.0) -> bool:
    """Whether the process is gone, or dead and not yet collected, within that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.1])
def test_ranks_whose_launcher_dies_as_they_start_end(tmp_path: Path, delay: float) -> None:
    """Whatever the moment: none runs on unwatched."""
    text = """
        open(sys.argv[1] + f"/began{rank}", "w").write(str(os.getpid()))
        from zoo.parallel import processes
        processes._POLL_SECONDS = 0.05
        processes.end_with_parent()
        time.sleep(20)
        open(sys.argv[1] + "/survived", "w").close()
    """
    code = (
        "import subprocess, sys; from zoo.launch.rank_group import run_ranks; start = subprocess.Popen.__init__\n"
        "def note(*a, **k):\n    start(*a, **k); open(sys.argv[-1] + '/started', 'a').write('x')\n"
        "subprocess.Popen.__init__ = note; sys.exit(run_ranks(sys.argv[1:], 2))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, *program(text), str(tmp_path)])
    while not (tmp_path / "started").exists():
        time.sleep(0.001)
    time.sleep(delay)
    parent.kill()
    parent.wait()
    time.sleep(0.5)  # for a rank to begin, where it will
    for path in tmp_path.glob("began*"):
        assert ended(int(path.read_text() or 0) or 2**22 + 1)
    assert not (tmp_path / "survived").exists()


def test_a_rank_of_another_launcher_ends_with_it(tmp_path: Path) -> None:
    """torchrun and SLURM name no process: who started the rank is asked as zoo is imported, before that one can be gone."""
    rank = (
        "import os, sys, time, zoo; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(1.0)\n"
        "from zoo.parallel import processes; processes._POLL_SECONDS = 0.05; processes.end_with_parent(); time.sleep(60)"
    )
    agent = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    pid = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", agent, rank, str(pid)])
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.01)
    parent.kill()  # while the rank still imports
    parent.wait()
    assert ended(int(pid.read_text()))


def test_a_launcher_s_name_that_was_handed_on_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.parallel import processes as parent

    with parent.Launcher() as here:
        named = here.environment[parent.LAUNCHER]
    monkeypatch.setenv(parent.LAUNCHER, named)  # its pipe is closed by now, or another file has its number
    found = parent._Parent.find()
    assert (found.pid, found.pipe) == (os.getppid(), None) and parent.LAUNCHER not in os.environ
    assert found.lives(0.0)
