"""Lengths are kept for later starts: they are those that would be measured, and others once anything has changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.row_files import dialogue, write_jsonl

from zoo.config.schema import DataConfig, PackingConfig, Recipe, TrainConfig
from zoo.data.loading import lengths
from zoo.data.loading.loader import BatchLoader
from zoo.data.loading.sample_source import SampleSource
from zoo.data.processors.processor import Processor

ROWS = 60
BUDGET = 192


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lengths, "LEAST_KEPT", 1)
    monkeypatch.setattr(lengths, "KEPT_PROBES", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that were measured."""
    rows: list[int] = []
    measure = SampleSource.measure
    monkeypatch.setattr(SampleSource, "measure", lambda self, row: (rows.append(row), measure(self, row))[1])
    return rows


def write(folder: Path, texts: int = ROWS) -> str:
    Image.new("RGB", (64, 96)).save(folder / "a.png")
    rows = [dialogue(f"Say {'so ' * (number % 7)}", str(number)) for number in range(texts)]
    rows += [dialogue("Say <|im_end|>", "1"), dialogue("long " * 400, "1")]  # bad ones
    return write_jsonl(folder / "rows.jsonl", [*rows, {**dialogue("<image>?", "a"), "images": ["a.png"]}])


def started(path: str, processor: Processor, measured: list[int], cost: Any = None, **data: Any) -> tuple[Any, int]:
    """What a start plans, and how many rows it measures."""
    measured.clear()
    settings = DataConfig(on_error="skip", shuffle=False, **data)
    train = TrainConfig(global_batch=2, micro_batch=1)
    recipe = replace(Recipe(), packing=PackingConfig(budget=BUDGET), train=train, data=settings)
    source = SampleSource.open([path], processor, settings, budget=BUDGET)
    loader = BatchLoader(source, recipe, cost=cost, prefetch=False)
    steps = loader.steps_for_epochs(1)
    count, bins = len(measured), []
    while batches := loader.next_step():
        bins.append([batch.sources for batch in batches])
    return (steps, bins, source.counts), count


def test_a_second_start_measures_some_rows_alone(folder: Path, processor: Processor, measured: list[int]) -> None:
    path = write(folder)
    planned, count = started(path, processor, measured)
    assert count >= ROWS + 3 and planned[2] == {"special_token_in_text": 1, "overlong": 1}
    again, count = started(path, processor, measured)
    assert again == planned and count == 3 + 2  # probes and bad rows
    (place,) = (folder / "cache" / "zoo" / "lengths").iterdir()
    place.write_bytes(place.read_bytes()[:-20])
    again, count = started(path, processor, measured)
    assert again == planned and count >= ROWS + 3


def test_what_has_changed_is_measured(folder: Path, processor: Processor, measured: list[int]) -> None:
    path = write(folder)
    planned, _ = started(path, processor, measured)
    for cost, data in ((None, {"max_pixels": 64 * 64}), (lambda size: 7 * size.length, {})):
        _, count = started(path, processor, measured, cost, **data)
        assert count >= ROWS + 3
    path = write(folder, ROWS + 5)
    other, count = started(path, processor, measured)
    assert count >= ROWS + 8 and other != planned
    fresh, _ = started(write(folder, ROWS + 5), processor, measured)
    assert fresh == other


def test_another_size_of_a_row_voids_all(
    folder: Path, processor: Processor, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(folder)
    planned, _ = started(path, processor, measured)
    (place,) = (folder / "cache" / "zoo" / "lengths").iterdir()
    tokens, costs = lengths.load_sizes(place, ROWS + 3)  # type: ignore[misc]
    lengths.save_sizes(place, tokens + 1, costs)
    again, count = started(path, processor, measured)
    assert again == planned and count >= ROWS + 3
