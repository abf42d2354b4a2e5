"""In `train.epochs` every usable row comes so many times, in steps whose number is known or corrected."""

import json
import random
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.length_rows import Reader, Texts, rows_of

from zoo.config.schema import DataConfig, PackingConfig, ParallelConfig, Recipe, TrainConfig
from zoo.data.errors import RowError
from zoo.data.loading.lengths import LENGTH_PROBES
from zoo.data.loading.loader import BatchLoader
from zoo.data.loading.sample_source import SampleSource
from zoo.data.sources.mixture import SourceShare
from zoo.data.sources.row_set import RowSet
from zoo.errors import UserError

BUDGET = 64


def recipe(global_batch: int = 2, mode: str = "thd", micro_batch: int = 1, **data: Any) -> Recipe:
    return Recipe(
        packing=PackingConfig(mode=mode, budget=BUDGET),
        train=TrainConfig(global_batch=global_batch, micro_batch=micro_batch),
        data=DataConfig(**{"lookahead": 12, "on_error": "skip", **data}),
    )


def loader_of(rows: Any, config: Recipe, **options: Any) -> BatchLoader:
    source = SampleSource.of_rows(rows, Reader(), config.data, budget=BUDGET)
    return BatchLoader(source, config, **{"prefetch": False, **options})


type Step = list[tuple[str, ...]]


def drawn(loader: BatchLoader, most: int = 10**6) -> list[Step]:
    """The sources of each micro-batch, step by step, to the end or for so many steps."""
    found: list[Step] = []
    while len(found) < most and (batches := loader.next_step()):
        found.append([batch.sources for batch in batches])
        assert all(batch.sources or (batch.filler and not batch.loss_weight) for batch in batches)
    return found


def times(steps: list[Step]) -> Counter[str]:
    return Counter(name for step in steps for sources in step for name in sources)


def random_lengths(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randint(2, BUDGET) for _ in range(count)]


LENGTHS = {
    "spread": random_lengths(75),
    "long and short": [BUDGET - 4] * 20 + [3] * 20,
    "short": [5] * 23,
    "all long": [BUDGET] * 9,
    "one": [7],
}


def texts_of(lengths: list[int], known: bool = True) -> Texts:
    return [(length if known else "-", length) for length in lengths]


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(
    ("mode", "global_batch", "ranks", "data"),
    [
        ("thd", 2, 1, {}),
        ("thd", 8, 4, {}),
        ("thd", 4, 2, {"lookahead": 1}),
        ("thd", 3, 3, {"lookahead": 500, "shuffle": False}),
        ("none", 4, 1, {}),
        ("none", 8, 2, {"shuffle": False}),
    ],
)
def test_every_row_comes_as_often_as_there_are_epochs(
    mode: str, global_batch: int, ranks: int, data: dict[str, Any], name: str, epochs: int
) -> None:
    config = recipe(global_batch, mode, 2 if mode == "none" else 1, **data)
    lengths = LENGTHS[name]
    loaders = [loader_of(rows_of(texts_of(lengths)), config, dp_rank=rank, dp_size=ranks) for rank in range(ranks)]
    (steps,) = {loader.steps_for_epochs(epochs) for loader in loaders}
    by_rank = [drawn(loader) for loader in loaders]
    assert [len(one) for one in by_rank] == [steps] * ranks  # exact: headers give all lengths
    assert all(len({len(one[step]) for one in by_rank}) == 1 for step in range(steps)), "ranks would wait"
    together = [[sources for one in by_rank for sources in one[step]] for step in range(steps)]
    assert times(together) == {f"x:{n}": epochs for n in range(len(lengths))}
    assert all(loader.exact and loader.total_steps == loader.step == steps for loader in loaders)
    assert all(loader.next_step() == [] and loader.step == steps for loader in loaders)


def test_bins_are_those_of_a_run_of_steps_until_the_last_ones() -> None:
    rows = rows_of(texts_of(LENGTHS["spread"]))
    endless, ending = loader_of(rows, recipe()), loader_of(rows, recipe())
    total = ending.steps_for_epochs(2)
    whole = drawn(ending)
    assert len(whole) == total
    assert whole[: total - 7] == drawn(endless, total - 7)


@pytest.mark.parametrize("known", [True, False], ids=["headers", "encoded"])
@pytest.mark.parametrize("mode", ["thd", "none"])
@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 1)), ((1, 1), (4, 2))], ids=["2 to 1", "1 to 2 and more"])
def test_a_run_resumed_on_other_ranks_reads_on(
    before: tuple[int, int], after: tuple[int, int], mode: str, known: bool
) -> None:
    """Whatever step it stops at, with another number of bins a step as well; and `train.epochs` may be raised at the end."""
    rows = rows_of(texts_of(LENGTHS["spread"], known))

    def loaders(global_batch: int, ranks: int) -> list[BatchLoader]:
        config = recipe(global_batch, mode)
        return [loader_of(rows, config, dp_rank=rank, dp_size=ranks) for rank in range(ranks)]

    for stop in (1, 3, 8, 10**6):
        first, second = loaders(*before), loaders(*after)
        for loader in first:
            loader.steps_for_epochs(2)
        head = [sources for loader in first for step in drawn(loader, stop) for sources in step]
        (state,) = {json.dumps(loader.state_dict()) for loader in first}
        tail, taken = [], first[0].step
        for loader in second:
            loader.load_state_dict(json.loads(state))
            total = loader.steps_for_epochs(2 if stop < 10**6 else 3)
            steps = drawn(loader)
            assert taken + len(steps) == total == loader.total_steps
            tail += [sources for step in steps for sources in step]
        assert set(times([head, tail]).values()) == {2 if stop < 10**6 else 3}


@pytest.mark.parametrize("epochs", [0.01, 0.3, 1.5, 2.999])
@pytest.mark.parametrize("mode", ["thd", "none"])
def test_a_fraction_of_an_epoch_is_so_many_of_its_rows(mode: str, epochs: float) -> None:
    lengths = LENGTHS["spread"]
    loader = loader_of(rows_of(texts_of(lengths)), recipe(mode=mode))
    steps = loader.steps_for_epochs(epochs)
    found = drawn(loader)
    seen = times(found)
    assert len(found) == steps and seen.total() == max(1, int(epochs) * 75 + round(epochs % 1 * 75))
    assert set(seen.values()) <= {int(epochs), int(epochs) + 1}


def test_rows_that_cannot_be_used_end_no_run_too_early_and_make_no_empty_step() -> None:
    """Broken by their headers, when encoded, over-long; the last rows of all, too, and where a whole step was planned of them."""
    good = texts_of(random_lengths(30))
    for texts in (
        [*good, *[("-", 0)] * 40],
        [*good, *[(60, 0)] * 40],
        [*[(60, 0)] * 40, *good],
        [*good, *[(BUDGET + 1, 9)] * 40],
        [*good, *[(9, 60)] * 5],  # longer than its header says
    ):
        config = recipe(shuffle=False, overlong="drop", lookahead=1)
        loader = loader_of(rows_of(texts), config)
        loader.steps_for_epochs(2)
        found = drawn(loader)
        bad = [n for n, (guess, length) in enumerate(texts) if not length or (guess != "-" and int(guess) > BUDGET)]
        assert times(found) == {f"x:{n}": 2 for n in range(len(texts)) if n not in bad}
        assert loader.total_steps == loader.step == len(found)
        assert loader.source.counts.total() == len(bad)
    with pytest.raises(UserError, match="no usable row is left"):
        loader_of(rows_of([("-", 0)] * 3), recipe()).steps_for_epochs(1)
    strict = recipe(on_error="raise")
    with pytest.raises(RowError, match=r"x:30: broken"):
        loader_of(rows_of([*good, ("-", 0)]), strict).steps_for_epochs(1)


def test_an_estimate_is_corrected_and_the_same_after_a_resume() -> None:
    """Lengths that only encoding gives; the rows that are probed are longer than the others."""
    probed = set(np.linspace(0, 1023, LENGTH_PROBES).round().tolist())
    lengths = [BUDGET if n in probed else 4 for n in range(1024)]
    rows = rows_of(texts_of(lengths, known=False))

    def run(state: dict[str, Any] | None = None, stop: int = 10**6) -> tuple[list[int | None], dict[str, Any]]:
        loader = loader_of(rows, recipe(4, lookahead=64))
        if state is not None:
            loader.load_state_dict(state)
        totals: list[int | None] = [loader.steps_for_epochs(1)]
        assert not loader.exact
        while len(totals) <= stop and loader.next_step():
            totals.append(loader.total_steps)
        return totals, json.loads(json.dumps(loader.state_dict()))

    whole, end = run()
    actual = len(whole) - 1
    assert whole[0] != actual == whole[-1] == end["step"]
    errors = [abs(total - actual) for total in whole if total is not None]
    assert max(errors[len(errors) // 2 :]) < errors[0]
    _, state = run(stop=9)
    assert run(state)[0][1:] == whole[10:]


def test_rows_that_are_added_join_in_the_next_epoch() -> None:
    texts = texts_of(random_lengths(40))
    first = loader_of(rows_of(texts[:25]), recipe())
    first.steps_for_epochs(3)
    head = drawn(first, 3)
    second = loader_of(rows_of(texts), recipe())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())), [25])
    total = second.steps_for_epochs(3)
    tail = drawn(second)
    assert 3 + len(tail) == total
    assert times([*head, *tail]) == {f"x:{n}": 3 if n < 25 else 2 for n in range(40)}


def test_an_epoch_of_a_mixture() -> None:
    """Entries come as often as they say; by weights, an epoch is over when an entry has come as often as it says."""
    a, b = (rows_of(texts_of(random_lengths(count, count)), name) for name, count in (("a", 10), ("b", 30)))

    def run(first: SourceShare, second: SourceShare, epochs: float) -> dict[str, set[int]]:
        loader = loader_of(RowSet([a, b], ["a", "b"], [first, second]), recipe())
        steps = loader.steps_for_epochs(epochs)
        found = drawn(loader)
        assert len(found) == steps == loader.total_steps
        seen = times(found)
        return {name: {seen[row.source] for row in rows} for name, rows in (("a", a), ("b", b))}

    assert run(SourceShare(None, None, 2), SourceShare(None), 2) == {"a": {4}, "b": {2}}
    assert run(SourceShare(None, None, 0.5), SourceShare(None), 2) == {"a": {1}, "b": {2}}
    assert run(SourceShare(None, 0.5, 3), SourceShare(None, 0.5), 1) == {"a": {3}, "b": {1}}
    assert run(SourceShare(None, 0.25), SourceShare(None, 0.75), 2) == {"a": {2}, "b": {2}}


def test_ranks_of_an_interleaved_pipeline_have_a_multiple_of_its_stages() -> None:
    config = replace(recipe(8), parallel=ParallelConfig(pp=4, vpp=2))
    loader = loader_of(rows_of(texts_of([BUDGET] * 9)), config)
    assert loader.steps_for_epochs(1) == 2
    assert [len(step) for step in drawn(loader)] == [8, 4]


def test_a_step_in_preparation_is_prepared_again_where_an_end_is_given() -> None:
    rows = rows_of(texts_of([BUDGET] * 3))
    loader = loader_of(rows, recipe(2), prefetch=True)
    loader.begin()
    assert threading.active_count() and loader.steps_for_epochs(1) == 2
    assert times(drawn(loader)) == {f"x:{n}": 1 for n in range(3)}
    loader.close()
