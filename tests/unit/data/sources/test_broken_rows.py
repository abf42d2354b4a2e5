"""A hundred kinds of broken rows: each has a message of its own, and a run that skips them counts all."""

import json
import re
import warnings
from collections import Counter
from pathlib import Path

import pytest
from support.broken_rows import Broken, broken_rows

from zoo.config.schema import DataConfig
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.decoding_workers import DecodingWorkers
from zoo.data.processors.processor import Processor
from zoo.data.sources.rows import RowError

BUDGET = 256
GOOD = b'{"messages": [{"role": "user", "content": "Say 8."}, {"role": "assistant", "content": "8"}]}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken") / "data"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, Broken]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return broken_rows(folder)


def test_there_are_a_hundred(rows: dict[str, Broken]) -> None:
    assert len(rows) >= 100


def test_each_says_what_is_wrong_with_it(rows: dict[str, Broken], folder: Path, processor: Processor) -> None:
    said: dict[str, str] = {}
    wrong = []
    for number, (name, row) in enumerate(rows.items()):
        path = folder / f"row{number}.jsonl"
        path.write_bytes(row.line + b"\n")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                SampleSource.open([str(path)], processor, DataConfig(), budget=BUDGET).sample(0)
        except RowError as caught:
            error = caught
        else:
            pytest.fail(f"{name}: the row is taken for a good one")
        message = error.message.removesuffix(" (data.on_error=skip leaves out and lists such rows.)")
        if (error.source, error.cause) != (f"{path}:1", row.cause) or row.words not in message:
            wrong.append((name, error.cause, message))
        assert "\n" not in message and 20 < len(message) < 450, (name, message)
        assert re.search(r"[.?]$", message), (name, message)
        assert not re.search(r"0x[0-9a-f]{6}|Traceback|RowError", message), (name, message)
        said[name] = message
    assert not wrong, "\n".join(map(str, wrong))
    texts = Counter(said.values())
    assert not [name for name, text in said.items() if texts[text] > 1 and rows[name].cause != "bad_json"]


@pytest.mark.parametrize("count", [0, 2])
def test_none_stops_a_run_that_skips_and_none_is_uncounted(
    rows: dict[str, Broken], folder: Path, processor: Processor, tmp_path: Path, count: int
) -> None:
    """With and without decoding workers; good rows stand between the bad ones."""
    path = folder / "all.jsonl"
    path.write_bytes(b"".join(row.line + b"\n" + GOOD + b"\n" for row in rows.values()))
    decoder = {"decoder": DecodingWorkers(count, 60.0, 4096)} if count else {}
    data = DataConfig(on_error="skip")
    bad = tmp_path / "bad.jsonl"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = SampleSource.open([str(path)], processor, data, budget=BUDGET, bad_rows=bad, **decoder)
        source.prefetch(range(len(source)))
        good = [source.sample(index) for index in range(len(source))]
    assert sum(sample is not None for sample in good) == len(rows)
    assert source.counts == Counter(row.cause for row in rows.values())
    listed = {entry["source"]: entry for entry in map(json.loads, bad.read_text().splitlines())}
    assert len(listed) == len(rows)
    for number, (name, row) in enumerate(rows.items()):
        entry = listed[f"{path}:{2 * number + 1}"]
        assert entry["cause"] == row.cause and row.words in entry["message"], name
    if count:
        source.decoder.close()
