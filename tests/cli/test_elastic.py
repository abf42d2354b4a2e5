"""torchrun with a number of nodes that changes: a node joins, a node dies, and the losses are those of one undisturbed run.

`python -m pytest -m slow -s tests/cli/test_elastic.py` also prints what each change cost, by part.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.commands import Zoo, environment, logged, text_row, write_rows

from zoo.config.locate import checkpoints, read_state
from zoo.launch.rank_group import free_port

pytestmark = pytest.mark.slow(minutes=6)

BATCH = 4  # rows of a step, which three ranks do not divide
STEPS = 12  # that each world does, and saves within
PATIENCE = 180.0  # seconds for a start on a busy machine


class Nodes:
    """torchrun's agents, of a rank each, in one rendezvous."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.folder, self.running = folder, list[subprocess.Popen[str]]()
        torchrun = ["--nnodes", "1:3", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "elastic"]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        quick = ["--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1"]
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun, *rendezvous, *quick]
        self.command = [*command, "-m", "zoo", *arguments]

    def add(self) -> subprocess.Popen[str]:
        out = self.folder.with_name(f"node{len(self.running)}")
        with out.open("w") as said:
            env = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
            node = subprocess.Popen(
                self.command, env=env, stdout=said, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
        self.running.append(node)
        return node

    def lose(self, node: subprocess.Popen[str]) -> float:
        """End a node and its ranks at once, as when its machine is gone; returns when."""
        children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
        for pid in [node.pid, *map(int, children)]:
            os.kill(pid, signal.SIGKILL)
        node.wait()
        self.running.remove(node)
        return time.time()

    def until(self, *worlds: int) -> None:
        """Wait until these numbers of ranks have started, one after the other, and the last has done STEPS and saved."""
        deadline = time.monotonic() + PATIENCE
        while not (
            (starts := steps_by_ranks(self.folder))
            and [ranks for ranks, _ in starts] == [*worlds]
            and len(starts[-1][1]) >= STEPS
            and (saved := checkpoints(self.folder))
            and read_state(saved[-1])["ranks"] == worlds[-1]
        ):
            assert time.monotonic() < deadline and all(node.poll() is None for node in self.running), self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.parent.glob("node*")))

    def end(self) -> None:
        for node in self.running:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()


def records(folder: Path) -> list[dict[str, Any]]:
    file = folder / "train.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_by_ranks(folder: Path) -> list[tuple[int, list[int]]]:
    """Ranks and steps of each start in the log."""
    starts: list[tuple[int, list[int]]] = []
    for record in records(folder):
        if record.get("event") in ("start", "resume"):
            starts.append((record["ranks"], []))
        elif "event" not in record:
            starts[-1][1].append(record["step"])
    return starts


def cost(folder: Path, since: float, resumed: int) -> str:
    """What a change of the world at the time `since` cost, by part; `resumed` counts the resumptions before."""
    log = records(folder)
    at = [number for number, record in enumerate(log) if record.get("event") == "resume"][resumed]
    end = next(record for record in log[:at][::-1] if record.get("event") == "end")
    left, again = end["time"], end["step"] - log[at]["step"]
    startup = next(record for record in log[at:] if record.get("event") == "startup")
    phases = startup["phases"]
    load = phases["weights"] + phases["optimizer"]
    began, first = startup["time"] - startup["seconds"], phases["first step"]
    return (
        f"left after {left - since:.1f} s, rendezvous {began - left:.1f} s, start {startup['seconds'] - load - first:.1f} s "
        f"(imports {phases['imports']:.1f}), load {load:.1f} s, first step {first:.1f} s; {again} steps done again"
    )


def test_the_world_grows_and_shrinks_and_the_losses_stay(zoo: Zoo, tmp_path: Path) -> None:
    folder, straight = tmp_path / "run", tmp_path / "straight"
    rows = write_rows(tmp_path / "rows.jsonl", [text_row(number) for number in range(100)])
    options = [
        "recipe=qwen3_sft", "train.optimizer=adamw", f"data.train={rows}", f"train.global_batch={BATCH}", "train.save_every=5", "log.tensorboard=false", "log.predictions=0", "export=false",
        "data.eval=none", "train.lr=1e-4", "train.schedule=constant",
    ]  # fmt: skip
    given = ("nproc=", "recipe=qwen3_omni", "data.train=", "data.outside_root", "data.eval=")  # of the small omni run

    def arguments(run_dir: Path, *more: str) -> list[str]:
        of_others = [one for one in zoo.train_arguments(run_dir) if not one.startswith(given)]
        replaced = {one.partition("=")[0] for one in options}
        return [*(one for one in of_others if one.partition("=")[0] not in replaced), *options, *more]

    nodes = Nodes(folder, arguments(folder, "train.steps=5000"))
    try:
        nodes.add(), nodes.add()
        nodes.until(2)
        began = time.time()
        third = nodes.add()
        nodes.until(2, 3)
        print(f"\na node joined: {cost(folder, began, 0)}")
        lost = nodes.lose(third)
        nodes.until(2, 3, 2)
        print(f"a node was lost: {cost(folder, lost, 1)}")
    finally:
        nodes.end()
    said = nodes.said()
    for before, ranks in ((2, 3), (3, 2)):
        batch = f"train.global_batch={BATCH} is 2 micro-batches on each of {ranks} replicas"
        assert f"{before} ranks became {ranks}, and the batch stays: {batch}" in said
    assert "of which 2 of 6 only fill the step up and count nothing" in said

    found = {record["step"]: record for record in logged(folder)}
    last = steps_by_ranks(folder)[-1][1][STEPS - 1]
    assert zoo(*arguments(straight, "nproc=1", f"train.steps={last}")).code == 0
    for record in logged(straight):
        step = found[record["step"]]
        assert (step["real_tokens"], step["labels"]) == (record["real_tokens"], record["labels"])
        assert step["loss"] == pytest.approx(record["loss"], rel=1e-5, abs=1e-6), record["step"]
