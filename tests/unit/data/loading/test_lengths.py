"""Ranks that measure together: who encodes what, wrong estimates put right alike everywhere, resumed to the sample."""

import gc
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.length_rows import Reader, Texts, rows_of

from zoo.config.schema import DataConfig, PackingConfig, Recipe, TrainConfig
from zoo.data.errors import RowError
from zoo.data.loading.evaluation import EvalBatches, eval_batches
from zoo.data.loading.lengths import Lengths, Size
from zoo.data.loading.loader import BatchLoader
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.sizes import SampleSize
from zoo.errors import UserError

BUDGET = 64
MANY = settings(max_examples=40, deadline=None)


class Room:
    """Ranks as threads: `gather` waits for all ranks."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.values: list[Any] = [None] * size


class Member:
    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank, self.size = room, rank, len(room.values)
        self.exchanges = 0

    def gather(self, value: Any) -> list[Any]:
        self.exchanges += 1
        self.room.values[self.rank] = value
        self.room.barrier.wait()
        values = list(self.room.values)
        self.room.barrier.wait()
        return values

    def merge(self, value: Any, merged: Callable[[Sequence[Any]], Any]) -> Any:
        return merged(self.gather(value))


def together[T](size: int, task: Callable[[Member], T]) -> list[T]:
    """What each of `size` ranks returns; what the first that fails raises."""
    room, found, failed = Room(size), [None] * size, []

    def run(rank: int) -> None:
        try:
            found[rank] = task(Member(room, rank))
        except BaseException as error:
            failed.append(error)
            room.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise next((e for e in failed if not isinstance(e, threading.BrokenBarrierError)), failed[0])
    return found


def open_source(texts: Texts, **data: Any) -> SampleSource:
    config = DataConfig(**{"on_error": "skip", **data})
    return SampleSource.of_rows(rows_of(texts), Reader(), config, budget=BUDGET)


def recipe(global_batch: int = 4, **packing: Any) -> Recipe:
    return Recipe(
        packing=PackingConfig(**{"budget": BUDGET, **packing}),
        train=TrainConfig(global_batch=global_batch, micro_batch=1),
        data=DataConfig(lookahead=12),
    )


def cost(size: SampleSize) -> int:
    return 10 * size.length + size.length**2


def open_loader(texts: Texts, member: Any = None, config: Recipe | None = None) -> BatchLoader:
    rank, size = (0, 1) if member is None else (member.rank, member.size)
    options: dict[str, Any] = {"dp_rank": rank, "dp_size": size, "group": member, "cost": cost}
    return BatchLoader(open_source(texts), config or recipe(), prefetch=False, **options)


def steps(loader: BatchLoader, count: int) -> list[list[tuple[str, ...]]]:
    return [[batch.sources for batch in loader.next_step()] for _ in range(count)]


def global_steps(ranks: list[list[list[tuple[str, ...]]]]) -> list[list[tuple[str, ...]]]:
    """The bins of each step over all ranks, in no order."""
    return [sorted(batch for rank in ranks for batch in rank[step]) for step in range(len(ranks[0]))]


def rows_like(draw: Callable[[], int], count: int, how: str) -> Texts:
    texts: Texts = []
    for n in range(count):
        length = 3 + draw() % 40
        guess: int | str = {"headers": length, "encoding": "-", "wrong": max(1, length + n % 5 - 2)}[how]
        texts.append((guess, 0 if how == "wrong" and n % 7 == 3 else length))
    return texts


LENGTHS = [(7 * n) % 41 for n in range(60)]


def texts_of(how: str) -> Texts:
    values = iter(LENGTHS)
    return rows_like(lambda: next(values), len(LENGTHS), how)


# ---------------------------------------------------------------- who does what


def test_headers_are_enough_to_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is encoded that is not trained on, and each on one rank."""
    texts = texts_of("headers")

    def task(member: Member) -> tuple[Counter[str], set[str]]:
        loader = open_loader(texts, member)
        taken = {name for step in steps(loader, 3) for batch in step for name in batch}
        return loader.source.processor.encoded, taken

    ranks = together(4, task)
    for encoded, taken in ranks:
        assert set(encoded) == taken and max(encoded.values()) == 1
    assert sum(len(taken) for _, taken in ranks) == len(set().union(*(taken for _, taken in ranks)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_must_be_encoded_to_be_measured_is_shared(ranks: int) -> None:
    texts: Texts = [("-", 5)] * 64

    def task(member: Member) -> int:
        lengths = Lengths(open_source(texts), None, member)
        lengths.ahead(range(64))
        assert [lengths.get(number) for number in range(64)] == [(5, 5)] * 64
        return lengths.source.processor.encoded.total()

    assert together(ranks, task) == [64 // ranks] * ranks


def test_a_bad_row_is_counted_once_on_every_rank_and_raised_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: Texts = [("-", 5), ("-", 0), (7, 7), (9, 0)] * 5

    def counts(member: Member) -> dict[str, int]:
        loader = open_loader(texts, member)
        steps(loader, 6)
        return dict(loader.source.counts)

    assert together(2, counts) == [{"corrupt_media": 10}] * 2

    def raised(member: Member) -> str:
        source = open_source(texts, on_error="raise")
        loader = BatchLoader(source, recipe(), dp_rank=member.rank, dp_size=2, group=member, prefetch=False)
        with pytest.raises(RowError) as caught:
            steps(loader, 6)
        return str(caught.value)

    one, other = together(2, raised)
    assert one == other and one.startswith("x:") and "broken. (data.on_error=skip" in one


def test_overlong_rows_are_known_by_their_headers() -> None:
    source = open_source([(BUDGET + 1, 99), (5, 5)], overlong="drop", on_error="raise")
    lengths = Lengths(source)
    lengths.ahead([0, 1])
    assert [lengths.get(0), lengths.get(1)] == [None, (5, 5)]
    assert (source.counts, source.processor.encoded.total()) == ({"overlong": 1}, 0)
    strict = Lengths(open_source([(BUDGET + 1, 99)], on_error="raise"))
    strict.ahead([0])
    with pytest.raises(RowError, match=r"x:0: 65 tokens are over packing\.budget 64; raise packing\.budget"):
        strict.get(0)


# ---------------------------------------------------------------- the same on any number of ranks


@pytest.mark.parametrize("how", ["headers", "encoding", "wrong"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("mode", ["thd", "none"])
def test_a_step_has_the_same_bins_on_any_number_of_ranks(how: str, size: int, mode: str) -> None:
    texts, config = texts_of(how), recipe(mode=mode)
    alone = [sorted(step) for step in steps(open_loader(texts, config=config), 12)]
    ranks = together(size, lambda member: steps(open_loader(texts, member, config), 12))
    assert global_steps(ranks) == alone
    for rank in ranks:
        assert {len(step) for step in rank} == {4 // size}


def test_ranks_know_the_largest_of_the_micro_batches_that_run_together() -> None:
    def task(member: Member) -> list[list[tuple[int, int | None]]]:
        loader = open_loader(texts_of("wrong"), member)
        return [[(batch.total, batch.most_tokens) for batch in loader.next_step()] for _ in range(12)]

    together_at = [list(zip(*step, strict=True)) for step in zip(*together(2, task), strict=True)]
    batches = [one for step in together_at for one in step]
    assert len(batches) == 24 and len({total for one in batches for total, _ in one}) > 5
    for one in batches:
        assert {most for _, most in one} == {max(total for total, _ in one)}


@pytest.mark.parametrize("how", ["headers", "encoding", "wrong"])
def test_every_usable_row_comes_once_an_epoch_within_the_budget(how: str) -> None:
    texts = texts_of(how)
    loader = open_loader(texts)
    seen: Counter[str] = Counter()
    for _ in range(60):
        for batch in loader.next_step():
            assert batch.total <= BUDGET
            seen.update(batch.sources)
    good = {f"x:{n}" for n, (_, length) in enumerate(texts) if length}
    assert set(seen) == good
    assert max(seen.values()) - min(seen.values()) <= 2  # the look-ahead runs over the ends of epochs
    assert loader.source.counts == ({"corrupt_media": len(texts) - len(good)} if len(good) < len(texts) else {})


@MANY
@given(
    st.lists(st.integers(0, 40), min_size=8, max_size=60),
    st.sampled_from(["headers", "encoding", "wrong"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 9),
)
def test_a_run_resumes_to_the_sample_on_another_number_of_ranks(
    lengths: list[int], how: str, before: int, after: int, stop: int
) -> None:
    values = iter(lengths)
    texts = rows_like(lambda: next(values), len(lengths), how)
    whole = [sorted(step) for step in steps(open_loader(texts), 10)]

    def first(member: Member) -> tuple[list[list[tuple[str, ...]]], dict[str, Any]]:
        loader = open_loader(texts, member)
        return steps(loader, stop), json.loads(json.dumps(loader.state_dict()))

    heads = together(before, first)
    state = heads[0][1]
    assert all(other == state for _, other in heads)

    def second(member: Member) -> list[list[tuple[str, ...]]]:
        loader = open_loader(texts, member)
        loader.load_state_dict(state)
        return steps(loader, 10 - stop)

    tails = together(after, second)
    assert global_steps([head for head, _ in heads]) + global_steps(tails) == whole


@pytest.mark.slow
@MANY
@given(st.integers(0, 9), st.sampled_from([2, 3, 8]))
def test_another_global_batch_continues_with_the_same_bins(stop: int, global_batch: int) -> None:
    texts = texts_of("headers")
    whole = [batch for step in steps(open_loader(texts), 12) for batch in step]
    loader = open_loader(texts)
    head = [batch for step in steps(loader, stop) for batch in step]
    other = open_loader(texts, config=recipe(global_batch=global_batch))
    other.load_state_dict(loader.state_dict())
    tail = [batch for step in steps(other, 24 // global_batch) for batch in step]
    assert head + tail == whole[: len(head + tail)] + (head + tail)[len(whole) :]


@pytest.mark.parametrize("packing", [{"budget": 128}, {"align": 8}, {"mode": "none"}, {"budget": 48}], ids=str)
def test_other_packing_loses_and_repeats_no_row(packing: dict[str, Any]) -> None:
    texts = texts_of("headers")
    loader = open_loader(texts)
    seen = Counter(name for step in steps(loader, 3) for batch in step for name in batch)
    config = recipe(**packing)
    source = open_source(texts)
    other = BatchLoader(source, config, align=packing.get("align", 1), prefetch=False, cost=cost)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    while seen.total() < 5 * len(texts):
        seen.update(name for batch in other.next_step() for name in batch.sources)
    assert set(seen) == {f"x:{n}" for n in range(len(texts))}
    assert max(seen.values()) - min(seen.values()) <= 2
    back = open_loader(texts)  # and there again, with rows that no packer held
    back.load_state_dict(json.loads(json.dumps(other.state_dict())))
    seen.update(name for step in steps(back, 30) for batch in step for name in batch)
    assert max(seen.values()) - min(seen.values()) <= 2


def test_a_row_that_was_corrected_may_still_turn_out_broken() -> None:
    """A file that is lost between two epochs, say."""
    texts: Texts = [(5, 6)] + [(9, 9)] * 30
    loader = open_loader(texts)
    steps(loader, 8)
    assert loader.lengths.get(0) == (6, cost(SampleSize(6)))
    loader.source.bad_rows.remember(0, RowError("x:0", "missing_file", "gone."))
    loader.source._cache.clear()
    seen = {name for step in steps(loader, 20) for batch in step for name in batch}
    assert loader.source.counts == {"missing_file": 1}
    assert seen - {"x:0"} == {f"x:{n}" for n in range(1, 31)}


def test_a_sample_that_changes_each_time_is_refused() -> None:
    loader = open_loader([(5, 6)] * 40)
    loader.lengths.ahead([0])
    loader.lengths.exchange({0: Size(6, 6)}, None, lambda _: None)
    with pytest.raises(UserError, match="x:0: encoded twice, it has 6 tokens, then 7; does the file change"):
        loader.lengths.exchange({0: Size(7, 7)}, None, lambda _: None)


# ---------------------------------------------------------------- evaluation


@pytest.mark.parametrize("size", [1, 2, 3])
def test_evaluation_leaves_out_what_cannot_be_encoded(size: int) -> None:
    texts: Texts = [(n % 30 + 1, 0 if n % 10 == 4 else n % 30 + 1) for n in range(40)]

    def task(member: Member) -> tuple[list[str], int, dict[str, int]]:
        source = open_source(texts)
        options: dict[str, Any] = {"dp_rank": member.rank, "dp_size": size, "group": member}
        batches: EvalBatches = eval_batches(source, budget=BUDGET, **options)
        for _ in range(2):
            listed = list(batches)
            seen = [name for batch in listed if batch is not None for name in batch.sources]
            assert sorted(seen) == sorted(source.rows.name(n) for indices in batches.bins for n in indices)
        assert batches.filler().total > 0
        return seen, len(listed), dict(source.counts)

    ranks = together(size, task)
    good = [f"x:{n}" for n, (_, length) in enumerate(texts) if length]
    assert sorted(name for seen, _, _ in ranks for name in seen) == sorted(good)
    assert len({count for _, count, _ in ranks}) == 1
    assert all(counts == {"corrupt_media": 4} for _, _, counts in ranks)


def test_a_set_of_broken_rows_alone_is_refused() -> None:
    batches = eval_batches(open_source([(5, 0)] * 3), budget=BUDGET)
    assert list(batches) == [None]
    with pytest.raises(UserError, match=r"data\.eval: no row can be used \(3 corrupt_media\)"):
        batches.filler()


def test_rows_too_many_for_a_place_each_are_known_while_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: Texts = [(5, 5), (6, 0), ("-", 7), (8, 9)] * 3
    for limit in (10**6, 3):
        monkeypatch.setattr("zoo.data.loading.lengths.DENSE", limit)
        lengths = Lengths(open_source(texts))
        lengths.ahead(range(12))
        lengths.exchange({1: RowError("x:1", "corrupt_media", "broken."), 3: Size(9, 9)}, None, lambda _: None)
        assert [lengths.get(number) for number in range(5)] == [(5, 5), None, (7, 7), (9, 9), (5, 5)]
        lengths.forget_all_but([2, 3])
        assert [lengths.knows(number) for number in range(5)] == [limit > 3, limit > 3, True, True, limit > 3]
        assert [entry[0] for entry in lengths.state_dict()] == ([1, 3] if limit > 3 else [3])


@pytest.mark.parametrize("stop", [0, 3])
def test_a_stream_is_the_same_however_sizes_are_kept(stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = texts_of("wrong")
    wanted = steps(open_loader(texts), 10)
    monkeypatch.setattr("zoo.data.loading.lengths.DENSE", 1)
    loader = open_loader(texts)
    head = steps(loader, stop)
    again = open_loader(texts)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert head + steps(again, 10 - stop) == wanted


@pytest.mark.slow
def test_a_hundred_thousand_samples_leave_nothing_behind() -> None:
    """Objects held after 20,000 samples and after 100,000: rows, sizes and a full cache are all there is."""
    texts: Texts = [(n % 23 + 1, 0 if n % 100 == 7 else n % 23 + 1 + (n % 50 == 9)) for n in range(500)]
    loader, seen, held = open_loader(texts, config=recipe(global_batch=16)), 0, []
    for goal in (20_000, 100_000):
        while seen < goal:
            seen += sum(len(batch.lengths) for batch in loader.next_step())
        gc.collect()
        held.append(sys.getallocatedblocks())
    assert held[1] - held[0] < 1000, held


def test_a_recipe_may_change_between_runs() -> None:
    """Only rows and seed must be the same."""
    loader = open_loader(texts_of("headers"))
    steps(loader, 1)
    config = recipe()
    other = BatchLoader(open_source(texts_of("headers")), replace(config, data=DataConfig(lookahead=40)))
    other.load_state_dict(loader.state_dict())
    assert other.step == 1
    other.close()
