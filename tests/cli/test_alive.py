"""A rank that dies, fails, hangs or is frozen, and what clusters send: real runs of two ranks, made to misbehave."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import Zoo, environment, events, logged, metrics, summary

from zoo.config.locate import checkpoints
from zoo.launch.rank_group import free_port

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[1] / "support"
SECONDS = 15.0  # in which the others leave, on a busy machine


class Launched:
    """A process of its own that runs `zoo train`, and what it has said."""

    def __init__(self, command: list[str], folder: Path, fault: str = "", cwd: Path | None = None, **env: str) -> None:
        env |= {"FAULT": fault, "PYTHONPATH": str(SUPPORT / "faults")} if fault else {}
        self.folder, pipe = folder, subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=cwd, env=environment(**env), stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def until_step(self, step: int) -> None:
        deadline = time.monotonic() + 90
        while not (self.folder / "train.jsonl").exists() or len(logged_so_far(self.folder)) < step:
            assert self.process.poll() is None and time.monotonic() < deadline, self.process.communicate()
            time.sleep(0.02)

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def ended(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


def logged_so_far(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    return [r for line in lines if line.endswith("\n") and "event" not in (r := json.loads(line))]


def command(zoo: Zoo, folder: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "zoo", *arguments(zoo, folder, *overrides)]


def arguments(zoo: Zoo, folder: Path, *overrides: str) -> list[str]:
    return zoo.train_arguments(
        folder, "nproc=2", "train.steps=400", "log.tensorboard=false", "log.predictions=0", "export=false", *overrides
    )


def last_event(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "train.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("fault", "more", "code", "said", "reason"),
    [
        ("1 40 kill", (), 137, "rank 1 died, last seen after step ", "died"),
        ("0 40 raise", (), 1, "rank 0 failed after step 39, in data at zoo/data/loading/loader.py:", "failed"),
        ("1 40 hang", ("run.hang_timeout=0.05",), 76, "rank 1 got no further for 3 s (run.hang_timeout) after step 39, in data", "hangs"),
        ("0 40 freeze", ("run.hang_timeout=0.05",), 76, "rank 0 gave no sign of life for 3 s, last seen after step ", "silent"),
    ],
)  # fmt: skip
def test_the_others_leave_and_say_who_where_and_what_they_waited_for(
    zoo: Zoo, tmp_path: Path, fault: str, more: tuple[str, ...], code: int, said: str, reason: str
) -> None:
    folder = tmp_path / "run"
    run = Launched(command(zoo, folder, "train.save_every=4", *more), folder, fault)
    run.until_step(36)
    since = time.monotonic()
    got, _, err = run.ended()
    assert got == code, err
    patience = 2 * SECONDS if reason == "silent" else SECONDS  # the launcher lets a frozen rank have its time to end
    assert time.monotonic() - since < 3 + patience
    lines = [line for line in err.splitlines() if said in line]
    assert len(lines) == 1, err
    other = 1 - int(fault[0])
    assert re.search(rf"; rank {other} was waiting in (all_|gather_object|coalescing_manager)", lines[0]), lines[0]
    saved = re.search(rf"; the same command resumes from {folder}/checkpoints/iter_(\d+)$", lines[0])
    assert saved is not None, lines
    assert err.count("Traceback") <= (reason == "failed")
    assert (last_event(folder)["event"], last_event(folder)["reason"]) == ("end", reason)
    shown = zoo("show", str(folder), "--json")
    status = json.loads(shown.out)
    assert status["state"] == "failed" and said in status["why"] and len(status["ranks"]) == 2
    assert status["save_step"] == int(saved[1])


@pytest.mark.parametrize(
    ("ranks", "fault", "options"),
    [
        (2, "all 10 slow-data", ("train.steps=14", "train.save_every=12")),
        (2, "all 1 slow-rows,slow-eval,slow-save,slow-export", ("train.steps=3", "train.save_every=1", "export=true")),
        (1, "all 1 slow-rows,slow-eval,slow-save,slow-export", ("train.steps=3", "train.eval_every=1", "export=true")),
    ],
    ids=["steps", "everything", "everything, one rank"],
)  # fmt: skip
def test_a_slow_but_living_run_is_left_alone(
    zoo: Zoo, tmp_path: Path, ranks: int, fault: str, options: tuple[str, ...]
) -> None:
    """First batch, saves at the start, midway and at the end, evaluation and export: each longer than the timeout of 3 s."""
    folder, log = tmp_path / "run", tmp_path / "faults"
    given = [*options, "run.hang_timeout=0.05", f"nproc={ranks}"]
    code, out, err = Launched(command(zoo, folder, *given), folder, fault, FAULT_LOG=str(log)).ended()
    assert (code, err) == (0, ""), out
    assert {*log.read_text().split()} == {*fault.split()[2].split(",")}
    if "slow-data" in fault:
        slow = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines() if "slow_step" in line]
        assert "data" in [s["cause"] for s in slow], slow
    assert last_event(folder)["reason"] == "finished"
    assert not (folder / "health.json").exists()


def test_every_slow_fault_strikes(zoo: Zoo, tmp_path: Path) -> None:
    """What the slow tests above ask for, with waits of a hundredth of a second."""
    folder, log = tmp_path / "run", tmp_path / "faults"
    kinds = "slow-data,slow-network,slow-rows,slow-eval,slow-save,slow-export"
    options = ("nproc=1", "train.steps=2", "export=true")
    env = {"FAULT_LOG": str(log), "FAULT_SECONDS": "0.01"}
    code, _, err = Launched(command(zoo, folder, *options), folder, f"all 1 {kinds}", **env).ended()
    assert (code, err) == (0, "")
    assert {*log.read_text().split()} == {*kinds.split(",")}


def test_a_save_that_hangs_is_found(zoo: Zoo, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ("run.hang_timeout=0.05", "train.save_every=2")
    code, _, err = Launched(command(zoo, folder, *options), folder, "1 1 hang-save").ended()
    assert code == 76 and "rank 1 got no further for 3 s (run.hang_timeout)" in err, err
    assert "in save" in err and not checkpoints(folder)


def test_a_run_that_was_paused_goes_on(zoo: Zoo, tmp_path: Path) -> None:
    """All of its processes, for longer than the timeout: nobody is to blame for what he did not do meanwhile."""
    folder = tmp_path / "run"
    run = Launched(command(zoo, folder, "run.hang_timeout=0.05", "train.steps=60"), folder)
    run.until_step(5)
    processes = [run.process.pid, *run.children()]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in processes:
            os.kill(pid, number)
        time.sleep(6.0 if number is signal.SIGSTOP else 0.0)
    code, _, err = run.ended()
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("number", "to"),
    [
        (signal.SIGTERM, "launcher"), (signal.SIGUSR1, "rank"), (signal.SIGTERM, "all"), (signal.SIGHUP, "launcher"),
        (signal.SIGQUIT, "rank"),
    ],
)  # fmt: skip
def test_a_signal_saves_and_asks_to_be_started_again(zoo: Zoo, tmp_path: Path, number: signal.Signals, to: str) -> None:
    folder = tmp_path / "run"
    run = Launched(command(zoo, folder, "train.steps=2000"), folder)
    run.until_step(3)
    while_running = json.loads(zoo("show", str(folder), "--json").out)
    assert (while_running["state"], while_running["total_steps"]) == ("running", 2000)
    assert while_running["steps_per_second"] > 0 and while_running["eta_seconds"] > 0
    ranks = run.children()
    targets = {"launcher": [run.process.pid], "rank": ranks[1:], "all": [run.process.pid, *ranks]}[to]
    since = time.monotonic()
    for pid in targets:
        os.kill(pid, number)
    code, out, err = run.ended()
    assert (code, err) == (75, ""), err
    assert time.monotonic() - since < SECONDS
    at = summary(folder)["steps"]
    assert f"stopped at step {at} of 2000, saved in {folder}/checkpoints/iter_{at}" in out
    assert (folder / "checkpoints" / f"iter_{at}" / "state.json").is_file()
    assert last_event(folder)["reason"] == "preempted"
    assert "preempted" in zoo("show", str(folder)).out


def test_a_second_signal_leaves_at_once(zoo: Zoo, tmp_path: Path) -> None:
    """One that comes a second later: those before are the same request."""
    folder = tmp_path / "run"
    run = Launched(command(zoo, folder, "train.save_every=2"), folder, "all 1 slow-save")
    run.until_step(2)
    os.kill(run.process.pid, signal.SIGTERM)
    time.sleep(1.2)
    assert run.process.poll() is None, "the save takes twenty seconds"
    os.kill(run.process.pid, signal.SIGTERM)
    since = time.monotonic()
    code, _, err = run.ended()
    assert code == 75 and "Traceback" not in err and time.monotonic() - since < 8
    for checkpoint in (folder / "checkpoints").glob("iter_*"):
        assert (checkpoint / "state.json").is_file()


def test_torchrun_starts_a_killed_rank_again_and_the_run_goes_on_to_the_bit(zoo: Zoo, tmp_path: Path) -> None:
    folder, straight = tmp_path / "run", tmp_path / "straight"
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "zoo",
    ]  # fmt: skip
    options = ["train.steps=30", "train.save_every=4"]
    given = [a for a in arguments(zoo, folder, *options) if "nproc" not in a]
    run = Launched([*torchrun, *given], folder)
    run.until_step(5)
    while not checkpoints(folder):  # it is written beside the steps
        time.sleep(0.05)
    ranks = run.children()
    os.kill(ranks[1], signal.SIGKILL)
    code, out, err = run.ended()
    assert code == 0, err
    assert "resuming" in out and events(folder).count("resume") == 1
    lines = [line for line in err.splitlines() if line.startswith("zoo: ")]
    assert len(lines) == 1 and lines[0].startswith("zoo: rank 1 died, last seen after step "), lines
    assert Launched(command(zoo, straight, *options), straight).ended()[0] == 0
    assert metrics(folder) == metrics(straight)


def start_nodes(zoo: Zoo, folder: Path, options: list[str], **env: str) -> list[Launched]:
    """Two launchers of two ranks each. One name in `run.stage` is another folder for each: that in its working directory."""
    given = [a for a in arguments(zoo, folder, *options, "run.stage=/proc/self/cwd/stage") if "nproc" not in a]
    rendezvous = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    port, nodes = str(free_port()), []
    for node in range(2):
        place = folder.with_name(f"node{node}")
        place.mkdir(exist_ok=True)
        torchrun = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--master-port", port]
        command = [*torchrun, "--node-rank", str(node), "-m", "zoo", *given]
        nodes.append(Launched(command, folder, cwd=place, **env))
    return nodes


@pytest.mark.slow(minutes=4)
def test_a_lost_node_is_started_again_and_copies_on_what_it_had_staged(zoo: Zoo, tmp_path: Path) -> None:
    """Each node writes its ranks' files to a stage of its own. The lost one comes back with its part, and nothing is done twice."""
    folder, straight = tmp_path / "run", tmp_path / "straight"
    options = ["train.steps=12", "train.save_every=4", "train.global_batch=4"]
    nodes = start_nodes(zoo, folder, options, fault="2 1 slow-copy", FAULT_SECONDS="5")
    nodes[0].until_step(4)
    deadline = time.monotonic() + 60
    while "save" not in events(folder):
        assert nodes[0].process.poll() is None and time.monotonic() < deadline, nodes[0].process.communicate()
        time.sleep(0.02)
    for pid in [nodes[1].process.pid, *nodes[1].children()]:
        os.kill(pid, signal.SIGKILL)
    code, _, err = nodes[0].ended()
    nodes[1].ended()
    assert code and re.search(r"^zoo: ranks? [23](-3)? died", err, re.MULTILINE), err
    staged = [sorted((tmp_path / f"node{node}/stage").rglob("iter_4/rank*.bin")) for node in range(2)]
    names = [{path.name.partition("_")[0] for path in one} for one in staged]
    assert names == [{"rank0", "rank1"}, {"rank2", "rank3"}] and not checkpoints(folder)

    said = [node.ended() for node in start_nodes(zoo, folder, options)]
    assert [code for code, _, _ in said] == [0, 0], said
    log = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if line.get("event") == "resume"] == [4]
    assert not [path for node in range(2) for path in (tmp_path / f"node{node}/stage").rglob("*.bin")]
    assert Launched(command(zoo, straight, *options, "nproc=4"), straight).ended()[0] == 0
    assert metrics(folder) == metrics(straight)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Path]:
    """A folder with what SLURM's srun and scontrol do, as far as the batch script needs it."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "zoo").write_text(f'#!/bin/bash\nexec {sys.executable} -m zoo "$@"\n')
    (tools / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/scontrol\n')
    (tools / "srun").write_text(
        "#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexport SLURM_NTASKS=2 SLURM_NNODES=1 SLURM_STEP_ID=0\n"
        'for n in 0 1; do SLURM_PROCID=$n SLURM_LOCALID=$n "$@" & tasks="$tasks $!"; done\n'
        "trap 'kill -USR1 $tasks' USR1\nwait\nworst=0\n"
        "for task in $tasks; do wait $task; code=$?; [ $code -gt $worst ] && worst=$code; done\nexit $worst\n"
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    yield tools
    shutil.rmtree(tools)


def test_the_batch_script_saves_and_goes_back_into_the_queue(zoo: Zoo, cluster: Path, tmp_path: Path) -> None:
    folder, script = tmp_path / "run", zoo.folder / "run.sbatch"
    written = zoo(*arguments(zoo, folder), "--slurm-template")
    assert written.code == 0, written
    path = f"{cluster}:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": str(40_000 + os.getpid() % 10_000), "SLURM_JOB_NODELIST": "localhost"}
    try:
        run = Launched(["bash", str(script)], folder, PATH=path, **job)
        run.until_step(3)
        os.kill(run.process.pid, signal.SIGUSR1)
        code, out, err = run.ended()
    finally:
        script.unlink()
    assert (code, "zoo: exit code 75: back into the queue" in out) == (75, True), err
    assert (tmp_path / "scontrol").read_text() == f"requeue {job['SLURM_JOB_ID']}\n"
    assert (folder / "checkpoints" / f"iter_{len(logged(folder))}").is_dir()
