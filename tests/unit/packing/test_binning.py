"""Bins against their promises: budget, completeness, age bound, determinism, resumption, fill."""

import json
import random
from itertools import chain

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zoo.packing import BinPacker, plan_bins

MANY = settings(max_examples=60, deadline=None)
BUDGET = 64
LENGTHS = st.lists(st.integers(1, BUDGET), max_size=60)
ALIGN = st.sampled_from([1, 4, 16])
LOOKAHEAD = st.sampled_from([1, 2, 7, 100])


def aligned(length, align):
    return -(-length // align) * align


def naive_bins(lengths, budget, align, lookahead):
    """The same rule by plain scans: the oldest item, then always the longest that fits, oldest of equals."""

    def take(buffer):
        left = budget - aligned(buffer[0][1], align)
        taken = [buffer.pop(0)]
        while fitting := [item for item in buffer if aligned(item[1], align) <= left]:
            best = max(fitting, key=lambda item: (aligned(item[1], align), -item[0]))
            buffer.remove(best)
            taken.append(best)
            left -= aligned(best[1], align)
        return sorted(position for position, _ in taken)

    buffer = []
    for item in enumerate(lengths):
        buffer.append(item)
        while len(buffer) >= lookahead and sum(aligned(n, align) for _, n in buffer) >= budget:
            yield take(buffer)
    while buffer:
        yield take(buffer)


@MANY
@given(LENGTHS, ALIGN, LOOKAHEAD)
@example([], 1, 1)
@example([BUDGET], 1, 1)
@example([5] * 40, 4, 7)
def test_bins_keep_their_promises(lengths, align, lookahead):
    bins = list(plan_bins(lengths, BUDGET, align, lookahead))
    assert sorted(chain(*bins)) == list(range(len(lengths)))
    assert all(sum(aligned(lengths[i], align) for i in items) <= BUDGET for items in bins)
    assert all(items == sorted(items) for items in bins)
    assert bins == list(naive_bins(lengths, BUDGET, align, lookahead))


@MANY
@given(LENGTHS, LOOKAHEAD)
def test_every_bin_opens_with_the_oldest_item(lengths, lookahead):
    left = set(range(len(lengths)))
    for items in plan_bins(iter(lengths), BUDGET, lookahead=lookahead):
        assert items[0] == min(left)
        left -= set(items)


def test_an_item_that_fits_nowhere_else_still_leaves_in_time():
    packer = BinPacker(budget=100, lookahead=8)
    packer.add("long", 100)
    for n in range(7):
        packer.add(n, 10)
    assert packer.pop() == ["long"]


@MANY
@given(LENGTHS, ALIGN, LOOKAHEAD, st.integers(0, 60))
def test_a_resumed_packer_goes_on_as_if_never_stopped(lengths, align, lookahead, cut):
    def feed(packer, items):
        for index, length in items:
            packer.add(index, length)
            while packer.ready():
                yield packer.pop()

    items = list(enumerate(lengths))
    first = BinPacker(BUDGET, align, lookahead)
    bins = list(feed(first, items[:cut]))
    state = json.loads(json.dumps(first.state_dict()))
    second = BinPacker(BUDGET, align, lookahead)
    second.load_state_dict(state)
    assert len(second) == len(first)
    bins += list(feed(second, items[cut:])) + list(second.flush())
    assert bins == list(plan_bins(lengths, BUDGET, align, lookahead))


def test_a_state_may_resume_under_another_alignment_but_must_fit():
    packer = BinPacker(budget=10)
    packer.add("a", 9)
    coarse = BinPacker(budget=16, align=8)
    coarse.load_state_dict(packer.state_dict())
    assert list(coarse.flush()) == [["a"]]
    small = BinPacker(budget=10, align=8)
    small.add("kept", 3)
    with pytest.raises(ValueError, match=r"'a' has 9 tokens \(16 at align 8\)"):
        small.load_state_dict(packer.state_dict())
    assert list(small.flush()) == [["kept"]]


def test_short_samples_wait_until_they_fill_a_bin():
    assert list(plan_bins([1] * 20, budget=10, lookahead=1)) == [list(range(10)), list(range(10, 20))]


def test_bad_items_and_settings_are_refused_by_name():
    packer = BinPacker(budget=16, align=8)
    with pytest.raises(
        ValueError, match=r"'clip.wav' has 17 tokens \(24 at align 8\), over the budget of 16"
    ):
        packer.add("clip.wav", 17)
    with pytest.raises(ValueError, match="Item 3 has length 0"):
        packer.add(3, 0)
    assert len(packer) == 0
    with pytest.raises(IndexError, match="empty"):
        packer.pop()
    for name in ("budget", "align", "lookahead"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            BinPacker(**{"budget": 8, name: 0})
    with pytest.raises(ValueError, match="budget is 0"):
        plan_bins([], budget=0)  # at the call, not at the first bin


def test_fill_is_the_documented_one():
    draw = random.Random(0)
    lengths = [draw.randint(50, 1000) for _ in range(100_000)]
    bins = sum(1 for _ in plan_bins(lengths, budget=4096))
    assert 1 - sum(lengths) / (bins * 4096) < 0.0020
