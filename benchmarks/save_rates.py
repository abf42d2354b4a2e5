"""A disk's own rates, and in the same call what zoo's saves and loads of a model reach there.

    python -m benchmarks.save_rates recipe=qwen3_vl_sft size=2b nproc=1 folder=/disk

  recipe=qwen3_vl_sft size=2b nproc=1    what is trained on synthetic rows and saved; layers=8 takes so many of its decoder
  folder=. disk_mb=4096                  where, with room for three checkpoints; MB that dd writes and reads there
  saves=2 steps=4 longest=256 packed=1   how many saves; steps before and next to each; most tokens of a sample; samples a row
  engine.precision=bf16 parallel.tp=2    any key of the recipe that has a dot

The disk is written and read by `dd`, several at once, past the page cache. Then a model with random weights is trained
on synthetic rows, and saved beside its steps by the code of a run; each save and the load say their bytes and seconds.
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import xxhash

from benchmarks import script
from benchmarks.script import scratch
from zoo.bench.options import Bounded
from zoo.bench.training.setting import LEAST_WARM, Setting
from zoo.bench.training.steps import BenchRun, Lines
from zoo.bench.training.train import with_layers
from zoo.checkpoint import integrity, loading, selection
from zoo.checkpoint.storage.disk import THREADS
from zoo.config.compose import load_recipe, save_recipe
from zoo.config.layers.keys import number
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.errors import size as in_words
from zoo.launch.launcher import run_task
from zoo.logging.startup_time import Startup
from zoo.parallel.signals import interrupts
from zoo.parallel.world import open_world
from zoo.types import JsonObject

BLOCK = 2**24  # bytes of one call of dd
MOST_PLAIN = 100  # steps without a save that are measured, where saves had as many beside them


@dataclass(frozen=True)
class SaveRateOptions(Bounded):
    """What is saved, and where. Keys with a dot are the recipe's own."""

    recipe: str = "qwen3_vl_sft"
    size: str = "2b"
    layers: int = number(0, 0, 2**10)  # of the decoder; 0: all
    nproc: int = number(1, 1, 4096)
    folder: str = "."  # on the disk that is measured; needs room for three checkpoints
    saves: int = number(2, 1, 100)
    steps: int = number(4, 1, 10**6)  # before the first save, and at least after the last one
    longest: int = number(256, 64, 10**6)  # most tokens of a sample
    packed: int = number(1, 1, 10**4)  # samples a step and data-parallel rank, in one row
    disk_mb: int = number(4096, 64, 10**7)  # MB that dd writes and reads


def run(options: SaveRateOptions, overrides: Sequence[str] = ()) -> JsonObject:
    """Bytes, seconds and rates of the disk (before and afterwards), of each save and of the load. UserError for options that make no sense."""
    recipe = _recipe(options, overrides)
    with scratch(options.folder) as folder:
        report: JsonObject = {"recipe": options.recipe, "size": options.size, "ranks": options.nproc}
        report["disk"] = disk_rates(folder, options.disk_mb * 10**6)
        print(_of_disk(report["disk"]), file=sys.stderr, flush=True)  # the rest may take minutes
        recipe = recipe.replace({"run.dir": str(folder / "run"), "run.stage": None})
        request = {
            "setting": vars(Setting("packed", options.packed, ranks=options.nproc)),
            "samples": options.steps * options.packed,
            "passes": 1,
            "warm_steps": LEAST_WARM,
            "longest": options.longest,
            "routing": "router",
            "saves": options.saves,
            "steps": options.steps,
        }
        result = run_task("benchmarks.save_rates:measure", recipe, options.nproc, request, fresh=True)
        shutil.rmtree(folder / "run")
        report["disk_after"] = disk_rates(folder, options.disk_mb * 10**6)  # some write fast for a while only
    return report | result


def _recipe(options: SaveRateOptions, overrides: Sequence[str]) -> Recipe:
    bench_keys = [
        f"size={options.size}", "model.init=random", "parallel.plan=[]", "log.tensorboard=false", "export=false",
        "run.dir=bench", "train.keep=1", "train.keep_best=null", f"packing.budget={options.packed * options.longest}", "train.steps=1000",
        f"train.global_batch={options.nproc}",
    ]  # fmt: skip
    recipe = load_recipe(options.recipe, [*bench_keys, *overrides])
    if not options.layers:
        return recipe
    return recipe.replace({"model.arch": with_layers(dict(recipe.model.arch), options.layers)})


def disk_rates(folder: Path, count: int) -> dict[str, float]:
    """Bytes a second of a folder's disk, written and read by several `dd` at once, and of one thread's checksums."""
    each = max(1, count // THREADS // BLOCK)
    files = [folder / f"dd{number}" for number in range(THREADS)]
    if shutil.disk_usage(folder).free < 2 * each * BLOCK * THREADS:
        raise UserError(f"{folder.parent}: too little room for disk_mb={count // 10**6}; give folder=...")
    source = [f"bs={BLOCK}", f"count={each}"]
    written = _timed([["if=/dev/zero", f"of={file}", *source, "conv=fsync"] for file in files], "oflag=direct")
    read = _timed([[f"if={file}", "of=/dev/null", *source] for file in files], "iflag=direct")
    for file in files:
        file.unlink()
    memory = bytes(2**28)
    began = time.monotonic()
    xxhash.xxh3_128_hexdigest(memory)
    total = each * BLOCK * THREADS
    return {
        "bytes": total,
        "write": total / written,
        "read": total / read,
        "hash": len(memory) / (time.monotonic() - began),
    }


def _timed(commands: Sequence[Sequence[str]], direct: str) -> float:
    """Seconds of several `dd` at once; without the page cache where the file system does that."""
    for more in ([direct], []):
        began = time.monotonic()
        running = [
            subprocess.Popen(["dd", *arguments, *more, "status=none"], stderr=subprocess.DEVNULL)
            for arguments in commands
        ]
        if not any([process.wait() for process in running]):
            return time.monotonic() - began
    raise UserError("dd can't write to that folder")


def measure(recipe: Recipe, request: JsonObject) -> JsonObject:
    """On every rank: train, save, load."""
    startup = Startup("imports")
    with interrupts() as stop, open_world(recipe) as world:
        return SavesRun(recipe, world, stop, startup, request).measure()


class SavesRun(BenchRun):
    """A run on synthetic rows that saves beside its steps."""

    def measure(self) -> JsonObject:
        """Steps, saves beside further steps, and a load; the slowest rank's times."""
        self.build()
        lines = Lines()
        self.log = lines  # type: ignore[assignment]
        if self.world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_recipe(self.recipe, self.folder / "config.yaml")
        dist.barrier()
        began = time.monotonic()
        for _ in range(self.request["steps"] + 1):  # they warm up
            self.train_step()
            self.saver.prepare(self.trainable)
        self._say(
            f"{self.startup.seconds:.0f} s to the first step, {time.monotonic() - began:.0f} s for {self.done} steps"
        )
        saves = []
        for number_ in range(self.request["saves"]):
            saves.append(self._measured_save(lines))
            self._say(_of_save(number_ + 1, saves[-1]))
        done = len(lines.steps)
        plain = self._plain_step_ms(lines, max(int(save["steps"]) for save in saves))
        behind = [line["step_ms"] for line in lines.steps[done:]]
        quarter = max(1, len(behind) // 4)
        first, last = median(behind[:quarter]), median(behind[-quarter:])
        self._say(f"steps behind   {first:,.0f} ms at first, {last:,.0f} ms at last")
        loading = self._measured_load()
        self._say(_of_load(loading))
        self.saver.close()
        copies = _copy_rate()
        parameters = sum(p.numel() for chunk in self.trainable.chunks for p in chunk.parameters())
        return {"parameters_of_rank": parameters, "step_ms": plain, "copy": copies, "saves": saves, "load": loading}

    def _plain_step_ms(self, lines: Lines, steps_during_save: int) -> float:
        """The median step that nothing is written beside, of as many as there were beside a save (`steps_during_save`), within bounds.

        Taken after the last save: steps are faster by then than those that the run began with.
        """
        count = max(self.request["steps"], min(steps_during_save, MOST_PLAIN))
        for _ in range(count):
            self.train_step()
        return self._most(median(line["step_ms"] for line in lines.steps[-count:]))

    def _measured_save(self, lines: Lines) -> dict[str, float]:
        before, first = _memory("VmRSS"), len(lines.steps)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        dist.barrier()
        began = time.monotonic()
        state = {
            "step": self.done,
            "model": self.description,
            "weights": loading.origin(self.recipe, self.assembly.source, self.assembly.fp32),
        }
        self.saver.start(self.trainable, state)
        stall, done = time.monotonic() - began, None
        while done is None:
            self.train_step()
            done = self.saver.poll()
            peak = _memory("VmHWM")
        during_save = [line["step_ms"] for line in lines.steps[first:]]
        self.saved = done.folder
        held = float(self.saver.held_bytes)
        return {
            "bytes": self._whole_bytes(done.folder),
            "bytes_of_rank": self._most(held),
            "stall_s": self._most(stall),
            "write_s": self._most(done.write_seconds),
            "steps": len(during_save),
            "step_ms": self._most(median(during_save)),
            "memory": self._most(peak - before),
        }

    def _measured_load(self) -> dict[str, float]:
        """What a start reads, checked as it is read; files were written past the page cache."""
        assert self.saved is not None
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        before, began = _memory("VmRSS"), time.monotonic()
        assert not selection.faults(self.saved, read=False)
        loading.load(self.trainable, self.saved, self.world, self.world.size)
        seconds = time.monotonic() - began
        return {
            "bytes": self._whole_bytes(self.saved),
            "load_s": self._most(seconds),
            "memory": self._most(_memory("VmHWM") - before),
        }

    def _whole_bytes(self, folder: Path) -> int:
        return sum((folder / name).stat().st_size for name in integrity.files_of(folder))

    def _most(self, value: float) -> float:
        """The largest value of all ranks."""
        flat = [value * (rank == self.world.rank) for rank in range(self.world.size)]
        return max(self.world.sum(flat) if self.world.size > 1 else flat)


def _copy_rate() -> float:
    """Bytes a second that PyTorch copies from one place of the host's memory to another."""
    source, target = (torch.ones(2**28, dtype=torch.uint8) for _ in range(2))
    began = time.monotonic()
    for _ in range(4):
        target.copy_(source)
    return 4 * source.nbytes / (time.monotonic() - began)


def _memory(name: str) -> float:
    """Bytes of this process's memory, by the kernel's name."""
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) * 1024.0 if match else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _of_disk(disk: dict[str, float], when: str = "") -> str:
    return (
        f"disk ({THREADS} dd)  {when}writes {in_words(disk['write'])}/s, reads {in_words(disk['read'])}/s; checksums of a thread "
        f"{in_words(disk['hash'])}/s"
    )


def _of_save(number_: int, save: dict[str, float]) -> str:
    return (
        f"save {number_}         {in_words(save['bytes'])}, stall {save['stall_s']:.2f} s, written in {save['write_s']:.1f} s: "
        f"{in_words(save['bytes'] / save['write_s'])}/s; a step beside it, of {save['steps']}, {save['step_ms']:,.0f} ms"
    )


def _of_load(load: dict[str, float]) -> str:
    return f"load           checked and loaded in {load['load_s']:.1f} s: {in_words(load['bytes'] / load['load_s'])}/s"


def table(result: JsonObject) -> str:
    """For people."""
    disk, load = result["disk"], result["load"]
    lines = [
        f"{result['recipe']} size={result['size']} on {result['ranks']} ranks: {result['parameters_of_rank']:,} parameters a rank, "
        f"a step takes {result['step_ms']:,.0f} ms without a save; host memory is copied at {in_words(result['copy'])}/s",
        _of_disk(disk),
    ]
    for number_, save in enumerate(result["saves"], 1):
        lines.append(
            f"{_of_save(number_, save)} ({save['step_ms'] / result['step_ms'] - 1:+.1%}); "
            f"{save['bytes'] / save['write_s'] / disk['write']:.2f} of the disk's rate; host memory +{in_words(save['memory'])} "
            f"(a rank holds {in_words(save['bytes_of_rank'])})"
        )
    lines.append(
        f"{_of_load(load)}, {load['bytes'] / load['load_s'] / disk['read']:.2f} of the disk; host memory +{in_words(load['memory'])}"
    )
    lines.append(_of_disk(result["disk_after"], "afterwards "))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(script.main(__doc__, SaveRateOptions, run, table, takes_recipe_keys=True))
