"""What a rank's host does at thousands of ranks, simulated on one: planning, process groups, steps, heartbeats and saves.

    python -m benchmarks.scale ranks=8,64,512,4096 --json

  recipe=qwen3_vl_moe_sft size=30b-a3b   planned, and saved with all weights, on nodes of 8xh200
  ranks=8,64,512,4096                    of the whole run, of which this process is the first
  rows=16 steps=3                        rows in a packed row; steps that are timed

The code is that of training: planner, megatron-core's groups and zoo's (torch's `fake` backend connects nothing), loader, totals of
a step, watchdog, and a checkpoint's index. What other ranks would send is made up of this rank's own, as many times. Seconds are of one
core; those of a step and of a second run beside the GPU's work. Networks and disks are left out.
"""

from __future__ import annotations

import json
import math
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks import script
from zoo.bench.options import Bounded
from zoo.checkpoint.storage.index import INDEX, Index, RankTable, write_index
from zoo.checkpoint.storage.pieces import Box, flat
from zoo.config.compose import load_recipe
from zoo.config.layers.keys import number
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.data.loading.loader import BatchLoader
from zoo.logging.step_timer import StepTimes
from zoo.model import build
from zoo.parallel.object_group import ObjectGroup
from zoo.parallel.world import World, groups, settings
from zoo.planner.parameters import EXPERTS
from zoo.planner.plan import model_of, plan
from zoo.training.dataloader import open_data
from zoo.training.step_metrics import StepTotals, TokenCounts
from zoo.watchdog.heartbeat import HeartbeatMonitor

NODE = 8  # ranks of a node
STATES = {
    "": 2,
    "state.remainder.": 2,
    "state.exp_avg.": 4,
    "state.exp_avg_sq.": 4,
}  # tensors of a weight, bytes of a number
COLUMNS = {
    "plan_seconds": "plan s", "group_seconds": "groups s", "sockets": "sockets", "recipe_kb": "recipes KB", "step_ms": "plan of a step ms",
    "totals_ms": "totals ms", "exchange_ms": "exchange ms", "exchange_kb": "exchange KB", "watch_first_ms": "first's watch ms/s",
    "watch_ms": "watch ms/s", "watch_kb": "watch KB/s", "store_mb": "store MB/s", "beat_seconds": "heartbeat s", "index_mb": "index MB",
    "index_seconds": "index written s", "open_seconds": "index read s",
}  # fmt: skip


@dataclass(frozen=True)
class ScaleOptions(Bounded):
    """What is simulated."""

    recipe: str = "qwen3_vl_moe_sft"
    size: str = "30b-a3b"
    ranks: tuple[int, ...] = number((8, 64, 512, 4096), 2, 10**5)
    rows: int = number(16, 4, 1000)
    steps: int = number(3, 1, 1000)


@dataclass(frozen=True)
class Scale:
    """What one rank does in a run of `ranks`, unless it says otherwise."""

    ranks: int
    plan_seconds: float
    group_seconds: float  # megatron-core's and zoo's, without connecting
    sockets: int  # of the object group, the one that has most
    recipe_kb: float  # received to compare recipes at the start
    step_ms: float  # a step's bins are planned and dealt, and this rank's encoded
    exchange_ms: float  # findings and lengths of a step
    exchange_kb: float
    totals_ms: float  # of a step's metrics, with the diagnosis of slow ranks
    watch_first_ms: float  # of a second: the watchdog's thread of the first rank
    watch_ms: float  # of a second: of any other rank
    watch_kb: float  # read from the store in a second
    store_mb: float  # that the store gives out in a second, to all ranks
    beat_seconds: float  # between two heartbeats
    index_mb: float
    index_seconds: float  # on the first rank, in a save
    open_seconds: float  # on each rank, at a start


def run(options: ScaleOptions) -> list[Scale]:
    """Simulate each number of ranks."""
    recipe = load_recipe(options.recipe, [f"size={options.size}"])
    return [_simulate(options, recipe, ranks) for ranks in options.ranks]


def _simulate(options: ScaleOptions, recipe: Recipe, ranks: int) -> Scale:
    nodes = max(1, ranks // NODE)
    hardware = f"{nodes}x{NODE}xh200" if nodes > 1 else f"{min(ranks, NODE)}xh200"
    planned, plan_seconds = timed(
        lambda: plan(load_recipe(options.recipe, [f"size={options.size}", f"hardware={hardware}"]))
    )
    tiny = _tiny(options, ranks)
    with simulated(tiny, ranks) as (world, group_seconds):
        sockets, recipe_kb = _object_group(ranks), len(pickle.dumps(asdict(planned.recipe))) / 1e3
        step, exchange, exchange_kb = _loader(tiny, world, options.steps)
        totals = _totals(tiny, world, options.steps)
    first, other, watch_kb, store_mb, beat = _watchdog(tiny, ranks)
    index_mb, written, opened = _index(planned.recipe, ranks)
    return Scale(
        ranks, plan_seconds, group_seconds, sockets, recipe_kb, step * 1e3, exchange * 1e3, exchange_kb, totals * 1e3, first * 1e3,
        other * 1e3, watch_kb, store_mb, beat, index_mb, written, opened,
    )  # fmt: skip


def timed[T](function: Callable[[], T]) -> tuple[T, float]:
    """What it returns, and its seconds."""
    began = time.process_time()
    return function(), time.process_time() - began


def _tiny(options: ScaleOptions, ranks: int) -> Recipe:
    """A model of no weight, whose rows are short: what its ranks exchange depends on their number alone."""
    keys = [
        "size=tiny", "hardware=cpu", f"train.global_batch={ranks}", f"packing.budget={options.rows * 64}", "train.steps=1000",
        "data.train=digits:train", "data.augment=0", "data.eval=none", "data.workers=0", f"run.dir={tempfile.gettempdir()}",
    ]  # fmt: skip
    recipe = validate(load_recipe("qwen3_moe_sft", keys), ranks)
    return replace(recipe, parallel=replace(recipe.parallel, ep=4 if ranks % 4 == 0 else 1))


@contextmanager
def simulated(recipe: Recipe, ranks: int) -> Iterator[tuple[World, float]]:
    """The first of so many ranks, with all groups of a run, and the seconds that they took."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with settings(recipe) as device:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        try:
            began = time.process_time()
            with groups(recipe, device) as world:
                yield world, time.process_time() - began
        finally:
            dist.destroy_process_group()


def _object_group(ranks: int) -> int:
    """Sockets of the rank that has most, in the groups that are really made."""
    members: list[int] = []

    def new_group(of: list[int], *_: Any) -> object:
        members.append(len(of) if 0 in of else 0)
        return None

    with patch.object(dist, "new_group", new_group):
        ObjectGroup()
    return sum(size - 1 for size in members if size)


class Recorder:
    """A `RankGroup` of this rank alone, that takes what it would take if each of `ranks` had sent the same."""

    rank, size = 0, 1

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.seconds, self.bytes = 0.0, 0

    def gather[T](self, value: T) -> list[T]:
        """This rank's value, after all have been read as many times."""
        sent = pickle.dumps([pickle.loads(pickle.dumps(value)) for _ in range(self._ranks)])
        _, seconds = timed(lambda: pickle.loads(sent))
        self.seconds, self.bytes = self.seconds + seconds, self.bytes + len(sent)
        return [value]

    def merge[T](self, value: T, merged: Callable[[Sequence[T]], T]) -> T:
        """The same, as a rank does it that has a block of its own to merge, and those of all blocks."""
        width = math.isqrt(self._ranks - 1) + 1
        sent = pickle.dumps([pickle.loads(pickle.dumps(value)) for _ in range(width)])
        for _ in range(2):
            whole, seconds = timed(lambda: merged(pickle.loads(sent)))
            self.seconds += seconds
        self.bytes += 2 * len(sent) + len(pickle.dumps(whole))
        return value


def _loader(recipe: Recipe, world: World, steps: int) -> tuple[float, float, float]:
    """Seconds of planning a step and of its exchange, and KB of that."""
    recorder = Recorder(world.size)
    with tempfile.TemporaryDirectory() as folder, patch("zoo.training.dataloader.object_group", lambda: recorder):
        data = open_data(recipe, build.assemble(recipe), world, Path(folder))
        loader = data.loader
        assert isinstance(loader, BatchLoader)
        loader._executor = None  # in this thread, whose time is taken
        loader.next_step()  # reads all rows
        loader.next_step()
        recorder.seconds, recorder.bytes = 0.0, 0
        _, seconds = timed(lambda: [loader.next_step() for _ in range(steps)])
        data.close()
    return (seconds - recorder.seconds) / steps, recorder.seconds / steps, recorder.bytes / steps / 1e3


def _totals(recipe: Recipe, world: World, steps: int) -> float:
    step: Any = SimpleNamespace(mtp_depths=0, preference=None, distillation=None, policy=None, speech=None)
    number = torch.ones((), dtype=torch.float64)
    times = StepTimes(replace(recipe, log=replace(recipe.log, straggler_steps=0)), world)
    log: Any = SimpleNamespace(main=True, event=lambda *_, **__: None)

    def one(index: int) -> StepTotals:
        totals = StepTotals.gather(
            [{"nll": number, "labels": number, "weight": number}], TokenCounts(1, 1, 1.0, 1), squared_norm=number, expert_shares={},
            parts=lambda: [0.1, 0.0, 0.1, 0.0], flags=lambda: [0.0] * 9, step=step, world=world,
        )  # fmt: skip
        totals.record(index, 1e-4, 1.0)
        times.end(log, index, 1.0, totals.parts)
        return totals

    for index in range(8):  # the median of slow steps needs some
        one(index)
    return timed(lambda: [one(index) for index in range(steps)])[1] / steps


def _watchdog(recipe: Recipe, ranks: int) -> tuple[float, float, float, float, float]:
    """What the watchdog takes in a second: seconds on the first and on another rank, KB read, MB that the store gives out; seconds between rounds."""
    exported: Any = dist  # more than it says
    store, read = exported.HashStore(), [0]
    stop: Any = SimpleNamespace(asked=False)
    found = []

    def multi_get(keys: list[str]) -> list[bytes]:
        values = store.multi_get(keys)
        read[0] += sum(map(len, values))
        return values

    for rank in (0, ranks - 1):
        world: Any = SimpleNamespace(rank=rank, size=ranks)
        with tempfile.TemporaryDirectory() as folder:
            watched = recipe.replace({"run.dir": folder})
            (Path(folder) / "train.jsonl").touch()
            with patch.dict("os.environ", {"LOCAL_WORLD_SIZE": str(min(ranks, NODE))}):
                watch: Any = HeartbeatMonitor(watched, world, stop)
            for other in range(ranks):
                beat = replace(watch._heartbeat, rank=other, host=f"node{other // NODE}")
                store.set(f"heartbeat{other}", json.dumps(beat.to_json()))
            store.set("diagnosis", "")
            watch._store = SimpleNamespace(multi_get=multi_get, set=store.set)
            watch._round()
            read[0] = 0
            _, seconds = timed(watch._round)
            found.append((seconds / watch._every, read[0] / watch._every / 1e3))
            every = watch._every
    (first, first_kb), (other_seconds, other_kb) = found
    return first, other_seconds, other_kb, (first_kb + (ranks - 1) * other_kb) / 1e3, every


def _index(recipe: Recipe, ranks: int) -> tuple[float, float, float]:
    """MB and seconds of the index of a save with all weights, and seconds to open it.

    Matrices of 2,048 columns stand for the model's: each part of a layer one. Ranges of data-parallel ranks cut them, as the
    distributed optimizer's do; an expert's are cut by the ranks that hold it alone.
    """
    model, parallel = model_of(recipe).parameters, recipe.parallel
    tables = [RankTable([], [], []) for _ in range(ranks)]
    at = [0] * ranks
    for cut in (False, True):
        weights = [one for one in model.weights if (one.part == EXPERTS) == cut]
        for share in range(parallel.ep if cut else 1):
            counts = [max(1, one.count // 2048 // (parallel.ep if cut else 1)) for one in weights]
            holders = range(share, ranks, parallel.ep) if cut else range(ranks)
            total, start, each = sum(counts) * 2048, 0, 0
            each = -(-total // len(holders))
            for place, rows in enumerate(counts):
                shape, first = (rows, 2048), start
                box = Box(f"part{int(cut)}.{place}.{share}", shape, (0, 0), 0, (0, 0), shape)
                for holder in range(first // each, min(len(holders), -(-(first + rows * 2048) // each))):
                    low, high = max(first, holder * each), min(first + rows * 2048, (holder + 1) * each)
                    rank, like = holders[holder], torch.empty(high - low, device="meta")
                    for prefix, size in STATES.items():
                        for piece in flat([box], shape, like, low - first, prefix):
                            tables[rank].pieces.append(
                                (
                                    piece.key,
                                    "float32" if size == 4 else "bfloat16",
                                    piece.shape,
                                    at[rank],
                                    piece.offsets,
                                    piece.sizes,
                                )
                            )
                            at[rank] += math.prod(piece.sizes) * size
                start += rows * 2048
    written = [replace(table, files=[(f"rank{rank}_0.bin", at[rank])]) for rank, table in enumerate(tables)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _, seconds = timed(lambda: write_index(folder, written))
        _, opened = timed(lambda: Index(folder))
        return (folder / INDEX).stat().st_size / 1e6, seconds, opened


def table(report: list[Scale]) -> str:
    """A line for each thing, a column for each number of ranks."""
    lines = [["", *(f"{scale.ranks:,}" for scale in report)]]
    lines += [[title, *(f"{getattr(scale, name):,.4g}" for scale in report)] for name, title in COLUMNS.items()]
    return "\n".join(
        "  ".join(text.rjust(12) if i else text.ljust(22) for i, text in enumerate(line)) for line in lines
    )


if __name__ == "__main__":
    sys.exit(script.main(__doc__, ScaleOptions, run, table, lambda report: [asdict(scale) for scale in report]))
