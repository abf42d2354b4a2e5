"""Packing costs about what one index_select of the same data does, and no Python runs for each token."""

import json
import sys
from typing import Any

import pytest
import torch

from benchmarks import packing
from benchmarks.packing_report import PackingOptions, as_dict, table
from zoo.errors import UserError
from zoo.packing import PackedLayout

SMALL = PackingOptions(samples=8, shortest=5, longest=60, repeats=2)


def python_calls(times: int) -> int:
    """Calls of Python and C functions that everything from the mask to unpacking takes, at `times` the tokens."""
    batch = packing.make_batch(SMALL, times)
    calls = packing.operations(batch, PackedLayout.from_mask(batch.mask, 4), cp=2)
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        PackedLayout.from_lengths(batch.lengths, 4)
        layout = PackedLayout.from_mask(batch.mask, 4)
        for _, call in calls:
            call(layout)
        for name in ("padding_mask", "segment_ids", "positions", "real_index", "cu_seqlens"):
            getattr(layout, name)
    finally:
        sys.setprofile(None)
    return count


def test_python_does_not_loop_over_tokens() -> None:
    python_calls(1)
    few, many = python_calls(4), python_calls(64)
    assert few == many < 10_000


@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_bytes_moved_are_at_most_one_and_a_half_times_those_of_index_select(cp: int) -> None:
    case = packing.measure(PackingOptions(repeats=1), cp)
    assert case.together.bytes_ratio <= 1.5
    assert all(line.bytes_ratio <= 1.5 for line in case.lines if line.elements)


@pytest.mark.slow
def test_bytes_grow_with_the_tokens() -> None:
    few, many = (packing.measure(SMALL, 2, times).together.moved for times in (100, 400))
    assert many == pytest.approx(4 * few, rel=0.01)


def test_traffic_counts_what_kernels_read_and_write() -> None:
    x, index = torch.arange(10), torch.arange(4)

    def moved(call: Any) -> int:
        with packing.Traffic() as traffic:
            call()
        return traffic.moved

    assert moved(lambda: x.index_select(0, index)) == 3 * 4 * 8
    assert moved(lambda: x.gather(0, index)) == 3 * 4 * 8
    assert moved(lambda: x.clone()) == 2 * 10 * 8
    assert moved(lambda: x.view(2, 5).split([1, 1])) == 0
    assert moved(lambda: x.new_full((3,), 1)) == 3 * 8
    assert moved(lambda: x.clone().scatter_(0, index, index)) == 2 * 10 * 8 + 3 * 4 * 8
    assert moved(lambda: x.clone().index_fill_(0, index, 1)) == 2 * 10 * 8 + 2 * 4 * 8


def test_operations_put_out_what_they_say() -> None:
    batch = packing.make_batch(SMALL)
    layout = PackedLayout.from_mask(batch.mask, 4)
    made = {name: call(layout) for name, call in packing.operations(batch, layout, cp=2)}
    torch.testing.assert_close(made["unpack ids"], batch.ids.masked_fill(~batch.mask, 0), rtol=0, atol=0)
    torch.testing.assert_close(made["unpack labels"], batch.labels.masked_fill(~batch.mask, -100), rtol=0, atol=0)
    torch.testing.assert_close(made["unpack positions"], batch.positions.masked_fill(~batch.mask, 0), rtol=0, atol=0)
    torch.testing.assert_close(
        made["slice positions"], made["pack positions"][:, :, layout.cp_index(0, 2)], rtol=0, atol=0
    )
    assert made["pack positions"].shape == (3, 1, layout.total)


def test_table_and_json_say_the_same() -> None:
    report = packing.run(SMALL)
    text, tree = table(report), json.loads(json.dumps(as_dict(report)))
    assert [case["cp"] for case in tree["cases"]] == [2, 4]
    together = tree["cases"][0]["together"]
    assert f"{together['time_ratio']:.2f}x" in text and f"{tree['growth']['exponent']:.2f}" in text
    assert together["time_ratio"] == pytest.approx(together["ms"] / together["flat_ms"])


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match="longest=4 is below shortest=5"):
        PackingOptions(shortest=5, longest=4)
