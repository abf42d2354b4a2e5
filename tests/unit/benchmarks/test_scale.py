"""`benchmarks.scale`: what a rank's host does grows slower than the number of ranks."""

import pytest

from benchmarks import scale as bench


@pytest.mark.slow
def test_what_each_rank_does_hardly_grows() -> None:
    options = bench.ScaleOptions(recipe="qwen3_moe_sft", size="30b-a3b", ranks=(64, 1024), rows=8, steps=1)
    few, many = bench.run(options)
    assert (few.sockets, many.sockets) == (14, 62)
    assert many.exchange_kb < 6 * few.exchange_kb and many.recipe_kb < 1.1 * few.recipe_kb
    assert many.watch_kb < few.watch_kb and many.beat_seconds == 1.0
    assert many.totals_ms < 8
    assert many.index_mb < 20 * few.index_mb
    shown = bench.table([few, many]).splitlines()
    assert len(shown) == 1 + len(bench.COLUMNS) and shown[0].split() == ["64", "1,024"]
