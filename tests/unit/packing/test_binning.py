"""Bins against their promises: budget, completeness, age bound, determinism, resumption, fill."""

import json
import random
from itertools import chain

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks import length_sets
from zoo.packing import BinPacker, binning, deal_bins, plan_bins

MANY = settings(max_examples=60, deadline=None)
BUDGET = 64
LENGTHS = st.lists(st.integers(1, BUDGET), max_size=60)
ITEMS = st.lists(st.tuples(st.integers(1, BUDGET), st.integers(1, 10**12)), max_size=60)
ALIGN = st.sampled_from([1, 4, 16])
LOOKAHEAD = st.sampled_from([1, 2, 7, 100])


def aligned(length, align):
    return -(-length // align) * align


def naive_bins(lengths, costs, budget, align, lookahead):
    """The same rule by plain scans over the buffer."""
    seen_tokens = seen_cost = 0

    def by_size(items, left):
        """Items that fit, shortest first, of equal lengths the oldest last."""
        fitting = [item for item in items if aligned(item[1], align) <= left]
        return sorted(fitting, key=lambda item: (aligned(item[1], align), -item[0], item[2]))

    def choose(fitting, left, missing):
        compared = fitting[::-1][:: 1 + len(fitting) // binning.CHOICES]
        return min(compared, key=lambda item: abs(item[2] - missing / left * aligned(item[1], align)))

    def fill(buffer, goal, number):
        taken, left, cost = [buffer[0]], budget - aligned(buffer[0][1], align), buffer[0][2]
        rest = buffer[1:]
        while left and (fitting := by_size(rest, left)):
            if number and len(taken) == 1:
                best = fitting[len(fitting) - 1 - number * len(fitting) // binning.PLANS]
            else:
                best = choose(fitting, left, goal - cost)
            rest.remove(best)
            taken.append(best)
            left -= aligned(best[1], align)
            cost += best[2]
        return left / budget + abs(cost - goal) / goal, taken

    def take(buffer):
        goal = seen_cost * budget / seen_tokens
        plans = []
        fitting = by_size(buffer[1:], budget - aligned(buffer[0][1], align))
        for number in range(min(binning.PLANS, max(len(fitting), 1))):
            plans.append(fill(buffer, goal, number))
            if plans[-1][0] <= binning.GOOD:
                break
        _, taken = min(plans, key=lambda plan: plan[0])
        for item in taken:
            buffer.remove(item)
        return sorted(position for position, _, _ in taken)

    buffer = []
    for position, (length, cost) in enumerate(zip(lengths, costs, strict=True)):
        buffer.append((position, length, cost))
        seen_tokens, seen_cost = seen_tokens + aligned(length, align), seen_cost + cost
        while len(buffer) >= lookahead and sum(aligned(n, align) for _, n, _ in buffer) >= budget:
            yield take(buffer)
    while buffer:
        yield take(buffer)


@MANY
@given(ITEMS, ALIGN, LOOKAHEAD)
@example([], 1, 1)
@example([(BUDGET, 1)], 1, 1)
@example([(5, 7)] * 40, 4, 7)
def test_bins_keep_their_promises(items, align, lookahead):
    lengths, costs = [length for length, _ in items], [cost for _, cost in items]
    bins = list(plan_bins(lengths, BUDGET, align, lookahead, costs))
    assert sorted(chain(*bins)) == list(range(len(lengths)))
    assert all(sum(aligned(lengths[i], align) for i in items) <= BUDGET for items in bins)
    assert all(items == sorted(items) for items in bins)
    assert bins == list(naive_bins(lengths, costs, BUDGET, align, lookahead))


@MANY
@given(LENGTHS, LOOKAHEAD)
def test_without_costs_an_item_costs_its_length(lengths, lookahead):
    assert list(plan_bins(lengths, BUDGET, 1, lookahead)) == list(plan_bins(lengths, BUDGET, 1, lookahead, lengths))


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
@given(ITEMS, ALIGN, LOOKAHEAD, st.integers(0, 60))
def test_a_resumed_packer_goes_on_as_if_never_stopped(given, align, lookahead, cut):
    def fill(packer, items):
        for index, (length, cost) in items:
            packer.add(index, length, cost)
            while packer.ready():
                yield packer.pop()

    items = list(enumerate(given))
    first = BinPacker(BUDGET, align, lookahead)
    bins = list(fill(first, items[:cut]))
    state = json.loads(json.dumps(first.state_dict()))
    second = BinPacker(BUDGET, align, lookahead)
    second.load_state_dict(state)
    assert len(second) == len(first)
    bins += list(fill(second, items[cut:])) + list(second.flush())
    lengths, costs = [length for length, _ in given], [cost for _, cost in given]
    assert bins == list(plan_bins(lengths, BUDGET, align, lookahead, costs))


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
    with pytest.raises(ValueError, match=r"'clip.wav' has 17 tokens \(24 at align 8\), over the budget of 16"):
        packer.add("clip.wav", 17)
    with pytest.raises(ValueError, match="Item 3 has length 0"):
        packer.add(3, 0)
    with pytest.raises(ValueError, match="Item 3 has cost 0"):
        packer.add(3, 1, 0)
    assert len(packer) == 0
    with pytest.raises(IndexError, match="empty"):
        packer.pop()
    for name in ("budget", "align", "lookahead"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            BinPacker(**{"budget": 8, name: 0})
    with pytest.raises(ValueError, match="budget is 0"):
        plan_bins([], budget=0)  # at the call, not at the first bin


def test_the_average_follows_what_comes() -> None:
    """After a change of unit, or of the data, bins are balanced as before."""
    draw = random.Random(0)
    lengths = [draw.randint(50, 1000) for _ in range(20_000)]
    costs = [length * draw.randint(1, 3) * (1 if place < 10_000 else 1000) for place, length in enumerate(lengths)]
    bins = list(plan_bins(lengths, 4096, 1, 256, costs))
    late = bins[-400:-100]
    work = sorted(sum(costs[item] for item in items) for items in late)
    assert work[285] < 1.05 * sum(work) / len(work)
    assert min(sum(lengths[item] for item in items) for items in late) > 0.95 * 4096


def test_fill_is_the_documented_one():
    draw = random.Random(0)
    lengths = [draw.randint(50, 1000) for _ in range(100_000)]
    bins = sum(1 for _ in plan_bins(lengths, budget=4096))
    assert 1 - sum(lengths) / (bins * 4096) < 0.0020


@pytest.mark.parametrize("name", length_sets.SETS)
def test_sets_are_drawn_alike_and_of_known_names(name):
    assert length_sets.draw(name, 50) == length_sets.draw(name, 50)
    assert length_sets.draw(name, 50) != length_sets.draw(name, 50, seed=1)
    with pytest.raises(ValueError, match="no set 'x'; known: receipts"):
        length_sets.draw("x", 1)


COSTS = st.lists(st.integers(1, 1000), min_size=1, max_size=8)


@MANY
@given(COSTS, st.integers(1, 4), st.randoms())
def test_ranks_get_as_many_bins_each_and_costs_are_even(costs, each, random_):
    """No worse than the greedy bound, whatever the costs; no rank has more than another could spare."""
    ranks = len(costs)
    bins = [cost + random_.randint(0, 5) for cost in costs for _ in range(each)]
    shared = deal_bins(bins, ranks)
    assert sorted(chain(*shared)) == list(range(len(bins)))
    assert {len(taken) for taken in shared} == {each}
    for taken in shared if ranks > 1 else ():
        assert [bins[i] for i in taken] == sorted((bins[i] for i in taken), reverse=True)
    sums = [sum(bins[i] for i in taken) for taken in shared]
    assert max(sums) - min(sums) <= max(bins)
    assert shared == deal_bins(bins, ranks)


def test_bins_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="3 bins can't be shared evenly among 2 ranks"):
        deal_bins([1, 2, 3], 2)
