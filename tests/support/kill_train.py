"""Kill a training run at random moments: `python kill_train.py FOLDER RANKS KILLS STEPS [WHEN [SEED]]`; prints what it saw as JSON.

A run of STEPS steps without a kill, then the same run killed KILLS times (SIGKILL, all ranks, in any order) and started
again each time by the same command, the last time to its end. Each start is a fork of this process, which has imported
everything; ranks go through zoo.launch.rank_main, as the launcher starts them. WHEN is `any` (moment), `mid-write`: as soon
as a save has written some of its bytes and not all, which it is made to do slowly, or `mid-copy`: the same of a copy from
run.stage. SEED (0) draws the moments. Losses and the rows that were trained on must
be the same, and every checkpoint that is to be seen at any moment must be whole.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).parents[1]))

import zoo.training.trainer  # noqa: F401  (for the forks)
from support.commands import text_row, write_rows
from support.tiny_qwen3_vl import write_tiny_qwen3_vl
from zoo.checkpoint import integrity
from zoo.checkpoint.progress import saving
from zoo.checkpoint.selection import DAMAGED
from zoo.checkpoint.staging import copying
from zoo.checkpoint.storage import disk
from zoo.config.compose import load_recipe, save_recipe
from zoo.config.locate import checkpoints
from zoo.data.loading.loader import BatchLoader
from zoo.launch import rank_main
from zoo.launch.rank_group import free_port
from zoo.registry import families

STALE = 120.0  # seconds in which a run must get further
PARALLEL = {1: [], 2: [], 4: ["parallel.tp=2", "parallel.ep=2"]}


def recipe_of(folder: Path, run_dir: Path, ranks: int, steps: int, *more: str) -> Path:
    """The resolved recipe of a small run: text rows of one epoch, a save every second step."""
    model, rows = folder / "model", folder / "rows.jsonl"
    if not rows.exists():
        write_tiny_qwen3_vl(model, moe=True, num_hidden_layers=2, mlp_only_layers=[0], deepstack=())
        write_rows(rows, [text_row(number) for number in range(40 * steps)])
    settings = {
        "hardware": "cpu", "engine.threads": 1, "run.dir": run_dir, "model.init": model, "nproc": ranks,
        "data.train": f"[{rows}]", "data.eval": f"[{rows}]", "train.eval_rows": 2, "data.lookahead": 8,
        "packing.budget": 64, "train.global_batch": 4, "train.steps": steps, "train.save_every": 2,
        "train.warmup_steps": 2, "train.lr": 1e-3, "train.eval_every": 0, "export": "false", "data.workers": 0,
        "log.tensorboard": "false", "train.aux_loss": 0.01,
    }  # fmt: skip
    overrides = [f"{key}={value}" for key, value in settings.items()]
    path = run_dir.with_suffix(".yaml")
    save_recipe(load_recipe("qwen3_vl_moe_sft", [*overrides, *PARALLEL[ranks], *more]), path)
    return path


def start(config: Path, trace: Path, ranks: int) -> list[int]:
    """One process a rank."""
    port = str(free_port())
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            if ranks > 1:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            _be_a_rank(config, trace.with_name(f"{trace.name}{rank}"))
        children.append(child)
    return children


def _be_a_rank(config: Path, trace: Path) -> NoReturn:
    os.dup2(os.open(f"{trace}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    note_rows(trace)
    code = 1
    try:
        code = rank_main.main([str(config)])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def note_rows(trace: Path) -> None:
    """Have the loader write down which rows each step gets."""
    handle = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    hand_out: Callable[[Any], Any] = BatchLoader.next_step

    def next_step(self: BatchLoader) -> Any:
        batches = hand_out(self)
        rows = [source for batch in batches for source in batch.sources]
        os.write(handle, (json.dumps([self.step, rows]) + "\n").encode())
        return batches

    BatchLoader.next_step = next_step  # type: ignore[method-assign]


def write_slowly() -> None:
    """Have saves of the forks write a block at a time."""
    write = os.pwrite

    def slow(handle: int, data: Any, at: int) -> int:
        time.sleep(0.001)
        return write(handle, data, at)

    disk.CHUNK, os.pwrite = disk.BLOCK, slow


def copy_slowly() -> None:
    """Have copies from the stage of the forks go a block at a time."""
    write = copying._write

    def slow(file: Any, data: memoryview, path: Path) -> None:
        for at in range(0, len(data), disk.BLOCK):
            time.sleep(0.0005)
            write(file, data[at : at + disk.BLOCK], path)

    copying._write = slow


def ended(children: list[int]) -> bool:
    """Whether the ranks have ended, which they must have done well."""
    codes = []
    for child in list(children):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            children.remove(child)
            codes.append(os.waitstatus_to_exitcode(status))
    assert not any(codes), f"a rank ended with {codes}"
    return not children


def kill(children: list[int]) -> None:
    random.shuffle(children)
    for child in children:
        os.kill(child, signal.SIGKILL)
        if random.random() < 0.3:
            time.sleep(random.uniform(0, 0.1))
    for child in children:
        os.waitpid(child, 0)


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The steps of train.jsonl, a half-written line left out."""
    found = {}
    log = run_dir / "train.jsonl"
    for line in log.read_text().splitlines(keepends=True) if log.exists() else []:
        if line.endswith("\n") and "event" not in (record := json.loads(line)):
            assert record["step"] not in found, "a step stands twice in the log"
            found[record["step"]] = record
    return [found[step] for step in sorted(found)]


def rows_of(trace: Path, ranks: int) -> dict[int, list[list[str]]]:
    """Step -> rows of each rank; of a step that was done again, the last time."""
    by_step: dict[int, list[list[str]]] = {}
    for rank in range(ranks):
        for line in trace.with_name(f"{trace.name}{rank}").read_text().splitlines():
            step, rows = json.loads(line)
            by_step.setdefault(step, [[] for _ in range(ranks)])[rank] = rows
    return by_step


def finish(config: Path, trace: Path, ranks: int) -> float:
    began = time.monotonic()
    children = start(config, trace, ranks)
    while not ended(children):
        time.sleep(0.02)
    return time.monotonic() - began


def wait_for_writing(run_dir: Path, children: list[int], born: float) -> None:
    """Until a save has written a part of its bytes, which differs from time to time."""
    share = random.uniform(0.0, 0.9)
    while (found := saving(run_dir)) is None or not share * found.total < found.written < found.total:
        assert not ended(children) and time.monotonic() - born < STALE, "no save was met"
        time.sleep(0.001)


def main(folder: Path, ranks: int, kills: int, steps: int, when: str = "any", seed: str = "0") -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    for part in ("config", "model", "step", "bridge", "processor"):
        families()["qwen3_vl"].load(part)
    random.seed(int(seed))
    if when == "mid-write":
        write_slowly()
    if when == "mid-copy":
        copy_slowly()
    more = [f"run.stage={folder / 'stage'}"] if when == "mid-copy" else []
    whole, killed = folder / "whole", folder / "killed"
    config = recipe_of(folder, whole, ranks, steps)
    seconds = finish(config, folder / "whole_rows", ranks)
    wanted = steps_of(whole)
    assert len(wanted) == steps

    config, trace = recipe_of(folder, killed, ranks, steps, *more), folder / "killed_rows"
    seen: Counter[str] = Counter()
    begun = 1.0  # seconds from the start to the first step
    for _ in range(kills):
        before = len(steps_of(killed))
        log = killed / "train.jsonl"
        size = log.stat().st_size if log.exists() else 0
        born = time.monotonic()
        children = start(config, trace, ranks)
        if when != "any":
            wait_for_writing(killed, children, born)
        elif random.random() < 0.2:  # while it starts
            time.sleep(random.uniform(0, begun))
        else:  # some steps later, with saves all the time
            while not (log.exists() and log.stat().st_size != size):
                assert not ended(children) and time.monotonic() - born < STALE, "it does not get on"
                time.sleep(0.005)
            begun = time.monotonic() - born
            time.sleep(random.uniform(0, 0.15 * begun + 0.5))
        if ended(children):
            break
        in_save, writing = any((killed / "checkpoints").glob(".partial-iter_*")), saving(killed)
        kill(children)
        for checkpoint in checkpoints(killed):
            assert not integrity.faults(checkpoint), integrity.faults(checkpoint)
        after = len(steps_of(killed))
        seen["kills"] += 1
        seen["in mid-write"] += writing is not None and 0 < writing.written < writing.total
        seen["in a save" if in_save else "with a new step" if after != before else "before a new step"] += 1
    finish(config, trace, ranks)
    assert not list((killed / "checkpoints").glob(f"{DAMAGED}*"))
    assert not list((killed / "checkpoints").glob(".partial*")), "something is left behind"
    assert not [path for path in (folder / "stage").rglob("*") if path.is_file()], "something is left in the stage"
    exact = ("step", "loss", "grad_norm", "lr", "real_tokens", "labels")
    found = steps_of(killed)
    assert [[r[k] for k in exact] for r in found] == [[r[k] for k in exact] for r in wanted]
    rows, wanted_rows = rows_of(trace, ranks), rows_of(folder / "whole_rows", ranks)
    assert {s: rows[s] for s in range(1, steps + 1)} == {s: wanted_rows[s] for s in range(1, steps + 1)}
    replicas = slice(None, None, 2 if ranks == 4 else 1)  # of two tensor-parallel ranks, both are given the rows
    dealt = [row for step in range(1, steps + 1) for mine in rows[step][replicas] for row in mine]
    assert len(dealt) == len(set(dealt)), "a row was trained on twice"
    done_again = sum(1 for r in range(1) for _ in trace.with_name(f"{trace.name}{r}").open()) - steps
    return {**seen, "steps": steps, "rows": len(dealt), "steps done again": done_again, "seconds": round(seconds, 1)}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), *sys.argv[5:])))
