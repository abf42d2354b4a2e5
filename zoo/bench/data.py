"""`zoo bench data`: how fast a recipe's data come, whether training would wait for them, and what memory they keep.

Four metrics: rows measured a second of one core (from texts and headers of files), samples a second of one core that decodes,
resizes and tokenizes them, the share of a step of `step_ms` that is spent waiting for its batches, which the recipe's
`data.workers` help to decode, and how the process's memory changes while so many samples go through the loader.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zoo.bench.options import Bounded
from zoo.config.compose import load_recipe
from zoo.config.layers.keys import number
from zoo.config.schema import Recipe
from zoo.data.errors import RowError
from zoo.data.loading.defaults import with_defaults
from zoo.data.loading.loader import BatchLoader
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.decoder import Decoder
from zoo.data.media.decoding_workers import decoder_for
from zoo.data.sources.mixture import SampleId
from zoo.model import build
from zoo.planner.sample_costs import training_cost
from zoo.types import JsonObject

MARKS = 10  # memory is read so often


@dataclass(frozen=True)
class DataBenchOptions(Bounded):
    """What is measured."""

    recipe: str = "qwen3_vl_sft"
    size: str = "tiny"
    data: str = ""  # a JSONL file or bundled set; default: the recipe's data.train
    rows: int = number(500, 1, 10**8)  # most rows that are measured and encoded one by one
    samples: int = number(2000, 1, 10**8)  # samples that go through the loader while memory is watched
    step_ms: int = number(200, 1, 10**6)  # length of the step that training is taken to have
    steps: int = number(20, 1, 10**6)
    cache_mb: int = number(64, 1, 10**8)  # data.cache_mb while memory is watched: the cache is full early


@dataclass(frozen=True)
class DataBenchReport:
    """What `zoo bench data` shows."""

    options: DataBenchOptions
    rows: int  # in the source
    known: float  # share of the rows whose size was known without encoding
    measured: float  # rows a second whose size was found out, one after the other
    encoded: float  # samples a second, one after the other, decoded by one worker
    tokens: float  # of those samples, a second
    workers: int  # processes that decode for the loader; 0: none but this one
    first_s: float  # seconds until the first batches
    prepared_ms: float  # milliseconds that a later step's batches take to prepare
    wait: float  # share of the later steps' time spent waiting
    samples: int  # that went through the loader while memory was watched
    memory: list[float]  # MiB in use by the process at each tenth of them, before the first as well

    @property
    def growth(self) -> float:
        """MiB by which memory grew over the last half, when caches are full."""
        return self.memory[-1] - self.memory[MARKS // 2]


def run(options: DataBenchOptions) -> DataBenchReport:
    """Measure; raises UserError for a recipe or rows that can't be used."""
    recipe = load_recipe(options.recipe, [f"size={options.size}"])
    if options.data:
        recipe = replace(recipe, data=replace(recipe.data, train=[options.data]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(options, recipe)
    finally:
        torch.set_num_threads(threads)


def _run(options: DataBenchOptions, recipe: Recipe) -> DataBenchReport:
    assembly = build.assemble(recipe)
    single, decoder = decoder_for(replace(recipe.data, workers=1)), decoder_for(recipe.data)

    def source(decoder: Decoder = single, **changed: Any) -> SampleSource:
        data = with_defaults(replace(recipe.data, **changed))
        more: JsonObject = {"augment": data.augment, "blank": data.blank_answers, "seed": recipe.run.seed}
        more |= {"budget": recipe.packing.budget, "decoder": decoder}
        return SampleSource.open(data.train, assembly.processor, data, **more)

    rows = source()
    some = list(map(SampleId, range(min(options.rows, len(rows)))))
    measured = _measure(rows, some)
    _encode(source(), some[:1])  # which starts the worker
    encoded = _encode(source(), some)
    loader = BatchLoader(source(decoder), recipe, cost=training_cost(assembly.config, recipe), prefetch=True)
    waited = _wait(loader, options)
    watched = _watch(BatchLoader(source(cache_mb=options.cache_mb), recipe), options.samples)
    for each in (decoder, single):
        each.close()
    workers = getattr(decoder, "count", 0)
    return DataBenchReport(options, len(rows), *measured, *encoded, workers, *waited, *watched)


def _measure(source: SampleSource, ids: Sequence[SampleId]) -> tuple[float, float]:
    """Share of rows known without encoding, and those a second."""
    if source.augment.strength:  # only encoding tells what a random change gives
        return 0.0, 0.0
    known = 0
    began = time.perf_counter()
    for sample_id in ids:
        try:
            size = source.encoder.measure(source.rows.row(sample_id))
        except RowError:
            continue
        known += size is not None
    return known / len(ids), len(ids) / (time.perf_counter() - began)


def _encode(source: SampleSource, ids: Sequence[SampleId]) -> tuple[float, float]:
    """Samples and tokens a second."""
    tokens = 0
    began = time.perf_counter()
    for sample_id in ids:
        sample = source.sample(sample_id)
        tokens += 0 if sample is None else sample.length
    seconds = time.perf_counter() - began
    return len(ids) / seconds, tokens / seconds


def _wait(loader: BatchLoader, options: DataBenchOptions) -> tuple[float, float, float]:
    """Seconds to the first batches, milliseconds to prepare a later step, and share of the steps spent waiting."""
    began = time.perf_counter()
    loader.next_step()
    first = time.perf_counter() - began
    waited = 0.0
    began = time.perf_counter()
    for _ in range(options.steps):
        time.sleep(options.step_ms / 1e3)
        asked = time.perf_counter()
        loader.next_step()
        waited += time.perf_counter() - asked
    share = waited / (time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(options.steps):
        loader.next_step()
    prepared = (time.perf_counter() - began) / options.steps * 1e3
    loader.close()
    return first, prepared, share


def _watch(loader: BatchLoader, samples: int) -> tuple[int, list[float]]:
    """Samples that went through, and memory at each tenth, between two steps, with no batch held."""
    memory, seen = [_memory()], 0
    while len(memory) <= MARKS:
        seen += sum(len(batch.lengths) for batch in loader.next_step())
        while len(memory) <= MARKS and seen >= samples * len(memory) / MARKS:
            memory.append(_memory())
    loader.close()
    return seen, memory


def _memory() -> float:
    """MiB that this process holds in memory."""
    gc.collect()
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts bytes


def as_dict(report: DataBenchReport) -> JsonObject:
    """The report as JSON takes it."""
    return asdict(report) | {"growth": report.growth}


def table(report: DataBenchReport) -> str:
    """The report in a few lines."""
    options = report.options
    measured = "by encoding them: data.augment changes their sizes"
    if report.measured:
        rate = f"{report.measured:,.0f} a second of a core from texts and headers"
        measured = f"{rate}, which gave the sizes of {report.known:.0%}"
    lines = [
        f"{options.recipe} size={options.size}: {report.rows} rows",
        f"rows measured     {measured}",
        f"samples encoded   {report.encoded:,.0f} a second of a core ({report.tokens:,.0f} tokens)",
        f"first step        after {report.first_s:.1f} s, with {report.workers} decoding workers",
        f"later steps       {report.prepared_ms:.0f} ms to prepare; of steps of {options.step_ms} ms, "
        f"{report.wait:.1%} of the time is spent waiting",
        f"memory            {report.memory[0]:.0f} MiB before, {report.memory[MARKS // 2]:.0f} at half, "
        f"{report.memory[-1]:.0f} after {report.samples} samples: {report.growth:+.1f} in the second half",
    ]
    return "\n".join(lines)
