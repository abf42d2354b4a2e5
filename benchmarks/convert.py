"""How fast, and in how much memory, a checkpoint of a published size goes to zoo and back.

    python -m benchmarks.convert recipe=qwen3_vl_sft size=4b folder=/disk

  recipe=qwen3_vl_sft size=4b            whose names and shapes it has, in bf16; layers=8 takes so many of its decoder
  folder=. shard_mb=2000                 where, on a disk with room for two of it; most MB of a weights file

The checkpoint is synthetic: the published names and shapes of the size, with random bytes. A plain copy of its files on the
same disk, in the same run, is what the rates are compared with.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import script
from benchmarks.script import scratch
from zoo.bench.options import Bounded
from zoo.bench.training.train import with_layers
from zoo.bridge import ExportWriter, Planned, ShardWriter
from zoo.config.compose import load_recipe
from zoo.config.layers.keys import number
from zoo.errors import UserError
from zoo.errors import size as in_words
from zoo.files import sync
from zoo.model.meta_model import build_meta_model
from zoo.types import JsonObject

ROOT = Path(__file__).parents[1]
CHUNK = 16 * 2**20  # bytes of random data made at once


@dataclass(frozen=True)
class ConvertOptions(Bounded):
    """What is measured, and where."""

    recipe: str = "qwen3_vl_sft"
    size: str = "4b"
    folder: str = "."  # on the disk that is measured; needs twice the checkpoint's bytes
    layers: int = number(0, 0, 2**10)  # of the decoder; 0: all
    shard_mb: int = number(2000, 1, 10**8)  # most bytes of a weights file, in MB


def run(options: ConvertOptions) -> JsonObject:
    """Seconds, bytes a second and peak memory of each way; `ratio` is to the copy's rate."""
    with scratch(options.folder) as folder:
        largest = make(folder / "hf", options)
        count = sum(file.stat().st_size for file in (folder / "hf").iterdir())
        began = time.monotonic()
        subprocess.run(["cp", "-r", folder / "hf", folder / "copy"], check=True)
        copied = time.monotonic() - began
        for file in (folder / "copy").iterdir():
            sync(file)
        through = time.monotonic() - began
        shutil.rmtree(folder / "copy")
        report: JsonObject = {
            "recipe": options.recipe,
            "size": options.size,
            "bytes": count,
            "largest_tensor": largest,
            "shard_bytes": options.shard_mb * 10**6,
            "cp": {"seconds": copied, "rate": count / copied, "synced_seconds": through},
        }
        for way, source, target in (("to_zoo", "hf", "zoo"), ("to_hf", "zoo", "back")):
            measured = _measured(folder / source, folder / target, options)
            measured |= {"rate": count / measured["seconds"], "ratio": copied / measured["seconds"]}
            measured["synced_ratio"] = through / measured["seconds"]
            report[way] = measured
            shutil.rmtree(folder / source)  # two copies at most lie on the disk
        return report


def make(folder: Path, options: ConvertOptions) -> int:
    """Write the synthetic checkpoint in bf16; returns the bytes of its largest tensor."""
    arch = load_recipe(options.recipe, [f"size={options.size}"]).model.arch
    if options.layers:
        arch = with_layers(dict(arch), options.layers)
    plan = build_meta_model(arch)
    planned = [
        Planned(name, tuple(shape), torch.bfloat16)
        for zoo_name, entry in plan.bridge.publish(plan.parameters).items()
        if entry.rule.writes(plan.dims)
        for name, shape in entry.hf_shapes(tuple(plan.parameters[zoo_name].shape), plan.dims).items()
    ]
    need, free = 2 * sum(tensor.nbytes for tensor in planned), shutil.disk_usage(folder.parent).free
    if need > free:
        raise UserError(f"{folder.parent}: {in_words(free)} are free, {in_words(need)} are needed; give folder=...")
    writer = ExportWriter(folder)
    writer.begin()
    shards = ShardWriter(writer.partial, planned, shard_bytes=options.shard_mb * 10**6)
    some = torch.randn(CHUNK // 2).to(torch.bfloat16)
    for tensor in shards.order:
        shards.write(tensor.name, _random(tensor, some))
    (writer.partial / "config.json").write_text(json.dumps(arch))
    writer.commit(shards.shards)
    return max(tensor.nbytes for tensor in planned)


def _random(tensor: Planned, some: Tensor) -> Iterator[Tensor]:
    left = tensor.nbytes // 2
    while left:
        yield some[: min(left, len(some))]
        left -= min(left, len(some))


def _measured(source: Path, target: Path, options: ConvertOptions) -> JsonObject:
    """A conversion in a process of its own."""
    code = "from benchmarks import convert; convert.measure_conversion()"
    command = [sys.executable, "-c", code, str(source), str(target), str(options.shard_mb)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def table(report: JsonObject) -> str:
    """The report in a few lines."""
    lines = [
        f"{report['recipe']} size={report['size']}: {in_words(report['bytes'])}, largest tensor "
        f"{in_words(report['largest_tensor'])}, shards of {in_words(report['shard_bytes'])}",
        f"{'cp':<8} {report['cp']['seconds']:>8.1f} s  {in_words(report['cp']['rate'])}/s; "
        f"{report['cp']['synced_seconds']:.1f} s until it is through to the disk",
    ]
    for way in ("to_zoo", "to_hf"):
        figures = report[way]
        lines.append(
            f"{way:<8} {figures['seconds']:>8.1f} s  {in_words(figures['rate'])}/s  {figures['ratio']:.2f} of cp, {figures['synced_ratio']:.2f} of cp "
            f"through to the disk; peak memory "
            f"{in_words(figures['peak'])}, {in_words(figures['peak'] - figures['start'])} over that after the imports"
        )
    return "\n".join(lines)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_conversion() -> None:
    """Convert as this process's arguments say, and print seconds and memory in a line of JSON."""
    from zoo.tools.convert import convert

    source, target, shard_mb = sys.argv[1:]
    start, began = _peak(), time.monotonic()
    convert(source, target, max_shard_size=int(shard_mb) * 10**6, quiet=True)
    print(json.dumps({"seconds": time.monotonic() - began, "peak": _peak(), "start": start}))


if __name__ == "__main__":
    sys.exit(script.main(__doc__, ConvertOptions, run, table))
