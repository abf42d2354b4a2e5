"""Samples that worker processes encode: the same ones, in the same order, whatever becomes of the processes."""

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo.config.schema import DataConfig, PackingConfig, Recipe, TrainConfig
from zoo.data.loading import encoding_workers, worker_processes
from zoo.data.loading.encoding_workers import RowToEncode
from zoo.data.loading.loader import BatchLoader
from zoo.data.loading.row_encoder import RowEncoder
from zoo.data.loading.sample_source import SampleSource
from zoo.data.processors.augment import Augment
from zoo.data.sample import MicroBatch
from zoo.data.sources.references import Blob
from zoo.data.sources.rows import Row, RowError

COUNT = 2


@pytest.fixture(scope="module")
def rows(media: Path) -> Path:
    """Rows whose sizes follow from headers, many times over, and two that can't be used."""
    known = [line for line in (media / "rows.jsonl").read_text().splitlines() if "mp4" not in line]
    lines = known * 12
    (media / "broken.png").write_bytes((media / "a.png").read_bytes()[:200])
    bad = {"messages": [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "7"}]}
    lines[5:5] = [json.dumps({**bad, "images": ["broken.png"]}), json.dumps({**bad, "images": ["none.png"]})]
    (media / "many.jsonl").write_text("\n".join(lines) + "\n")
    return media / "many.jsonl"


def source(
    rows: Path, processor: Any, workers: int, media_dtype: torch.dtype | None = None, **data: Any
) -> SampleSource:
    settings = DataConfig(on_error="skip", cache_mb=0, **data)
    options: dict[str, Any] = {"budget": 512, "workers": workers, "media_dtype": media_dtype}
    return SampleSource.open([str(rows)], processor, settings, **options)


def loader(rows: Path, processor: Any, workers: int) -> BatchLoader:
    recipe = Recipe(packing=PackingConfig(budget=512), train=TrainConfig(global_batch=2), data=DataConfig(lookahead=8))
    return BatchLoader(source(rows, processor, workers), recipe, prefetch=False)


def same(mine: list[MicroBatch], others: list[MicroBatch]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    pairs = zip(mine, others, strict=True)
    return all(equal(getattr(a, f.name), getattr(b, f.name)) for a, b in pairs for f in fields(MicroBatch))


def started(workers: encoding_workers.EncodingWorkers) -> None:
    """Wait until all processes are ready."""
    end = time.monotonic() + 120
    while len(workers._working) < COUNT and time.monotonic() < end:
        time.sleep(0.05)
    assert len(workers._working) == COUNT


@pytest.fixture(scope="module")
def wanted(rows: Path, processor: Any) -> list[list[MicroBatch]]:
    """Six steps without workers."""
    plain = loader(rows, processor, 0)
    return [plain.next_step() for _ in range(6)]


@pytest.fixture
def working(rows: Path, processor: Any) -> Iterator[BatchLoader]:
    """A loader whose workers are up, with a step behind it; their process was started ahead."""
    worker_processes.start_ahead(DataConfig(workers=COUNT, encode_in_workers=True))
    (ahead,) = worker_processes._ahead
    made = loader(rows, processor, COUNT)
    assert made.next_step() and made.source.workers is not None  # encoded here: no worker is up so early
    assert made.source.workers._started is ahead and not worker_processes._ahead
    started(made.source.workers)
    yield made
    made.close()


def test_steps_are_those_without_workers_and_workers_make_them(
    working: BatchLoader, wanted: list[list[MicroBatch]], rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, bad rows left out; steps planned ahead are resumed to the sample; and nothing stays behind."""
    workers = working.source.workers
    assert workers is not None and workers._started is not None
    process, here = workers._started.process, []
    encode = type(working.source.encoder).encode
    monkeypatch.setattr(
        type(working.source.encoder), "encode", lambda *given: (here.append(given[1].source), encode(*given))[1]
    )
    for step in wanted[1:4]:
        end = time.monotonic() + 60
        while (workers._queue or any(workers._working.values())) and time.monotonic() < end:
            time.sleep(0.02)  # else this process helps
        assert same(working.next_step(), step)
    media = {row.source for row in working.source.rows if row.media}
    made = sum(source in media for step in wanted[1:4] for batch in step for source in batch.sources)
    helped = len(media.intersection(here))  # those that came in when bad rows were found
    assert made > 20 and helped < made / 2, "rows with media are the workers'"
    assert working.source.counts == {"corrupt_media": 1, "missing_file": 1}
    state = working.state_dict()
    again = loader(rows, working.source.processor, 0)
    again.load_state_dict(state)
    assert same(again.next_step(), wanted[4]) and same(working.next_step(), wanted[4])
    working.close()
    assert process.poll() is not None and not _alive(process.pid)
    assert same(working.next_step(), wanted[5]), "encoded here from then on"


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow
def test_workers_that_are_killed_change_nothing(working: BatchLoader, wanted: list[list[MicroBatch]]) -> None:
    workers = working.source.workers
    assert workers is not None and workers._started is not None
    os.killpg(workers._started.process.pid, signal.SIGKILL)
    assert all(same(working.next_step(), step) for step in wanted[1:])
    assert not workers._working


def test_it_is_said_that_workers_can_not_start(
    rows: Path, processor: Any, wanted: list[list[MicroBatch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_processes, "module_command", lambda *_: [sys.executable, "-c", "exit(3)"])
    with pytest.warns(UserWarning) as told:
        made = loader(rows, processor, COUNT)
        assert all(same(made.next_step(), step) for step in wanted[:2])
        end = time.monotonic() + 60
        while made.source.workers._starting and time.monotonic() < end:  # type: ignore[union-attr]
            time.sleep(0.02)
    assert sum("a process that encodes rows has ended at its start" in str(one.message) for one in told) == 1
    made.close()


PROCESSOR = """
import torch
from zoo.data.sample import Sample

class Large:
    def encode(self, row, **options):
        return Sample(torch.ones(1), torch.ones(1), {"pixels": torch.full((2**23,), float(row.weight))})
"""


@pytest.mark.slow
def test_large_rows_and_large_samples_pass_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that sends a row of many bytes does not wait for a worker that sends a sample of many."""
    (tmp_path / "large_processor.py").write_text(PROCESSOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    encoder = RowEncoder(importlib.import_module("large_processor").Large(), DataConfig())
    workers = encoding_workers.EncodingWorkers(COUNT, encoder, 1000)
    jobs = [RowToEncode(n, Row((), (Blob(bytes(2**22), "x"),), weight=float(n)), None) for n in range(8)]
    workers.begin(jobs[:1])
    started(workers)
    workers.begin(jobs)
    end = time.monotonic() + 60
    while len(workers._done) < len(jobs) and time.monotonic() < end:
        time.sleep(0.05)
    for job in jobs:
        sample = workers.take(job.key)
        assert sample is not None and sample.media["pixels"][-1] == job.key
    workers.close()


@pytest.mark.slow
def test_random_changes_are_those_of_the_row(rows: Path, processor: Any) -> None:
    """Under data.augment too, a sample follows from its row and seed alone, and an error comes as it is."""
    plain, other = (source(rows, processor, count, max_frames=3) for count in (0, COUNT))
    workers = other.workers
    assert workers is not None
    number = next(i for i, row in enumerate(plain.rows) if row.kind == "multi_image")
    jobs = [RowToEncode(i, plain.rows.row(i), Augment(0.7, seed)) for i, seed in ((number, 3), (5, 4))]
    workers.begin(jobs)
    started(workers)
    workers.begin(jobs)
    wanted = plain.encoder.encode(jobs[0].row, Augment(0.7, 3))
    while (found := workers.take(number)) is None:
        workers.begin(jobs)
    torch.testing.assert_close(found.media["pixel_values"], wanted.media["pixel_values"], rtol=0, atol=0)
    torch.testing.assert_close(found.input_ids, wanted.input_ids, rtol=0, atol=0)
    with pytest.raises(RowError, match=r"many.jsonl:6: .*broken.png"):
        while workers.take(5) is None:
            workers.begin(jobs)
    other.close()


def test_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default as many as decode, where there is a GPU."""
    data = DataConfig(workers=3)
    assert worker_processes.count_for(data, 1) == 0
    assert worker_processes.count_for(replace(data, encode_in_workers=True), 1) == 3
    monkeypatch.setattr(worker_processes, "gpu_count", lambda: 1)
    assert worker_processes.count_for(data, 1) == 3
    assert worker_processes.count_for(replace(data, encode_in_workers=False), 1) == 0
    assert worker_processes.count_for(replace(data, workers=0), 1) == 0


def test_towers_inputs_in_half_precision(rows: Path, processor: Any) -> None:
    """What a tower would cast first of all is cast here, and nothing else."""
    plain, half = (source(rows, processor, 0, media_dtype=dtype) for dtype in (None, torch.bfloat16))
    cast = set()
    for number, row in enumerate(plain.rows):
        if not row.media or number in (5, 6):
            continue
        a, b = plain.encoder.encode(row), half.encoder.encode(row)
        assert a.media.keys() == b.media.keys()
        torch.testing.assert_close(a.input_ids, b.input_ids, rtol=0, atol=0)
        for name, x in a.media.items():
            torch.testing.assert_close(x.to(b.media[name].dtype), b.media[name], rtol=0, atol=0)
            cast |= {name} if b.media[name].dtype == torch.bfloat16 else set()
    assert cast == {"pixel_values", "input_features"}
