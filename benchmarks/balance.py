"""How full packed rows are, and how evenly data-parallel ranks share the work, on the sets of `benchmarks.length_sets`.

    python -m benchmarks.balance count=100000 ranks=8,64 bins=1 --json

  recipe=qwen3_vl_sft size=2b            whose FLOPs a sample costs
  count=100000 ranks=8,64 bins=1         rows of each set, data-parallel ranks, packed rows that a rank takes a step
  lookahead=256 align=1 seed=0           data.lookahead, packing.align

Each set's rows are planned in three ways:
- dealt: every rank takes as many rows in the order they come, as loaders without packing do (as many as a packed row
  holds on average);
- by tokens: packed to the budget, every sample costing its length;
- by cost: packed to the budget and to equal FLOPs of towers and decoder, as training does.

A step's work is that of the rank that has most; what it has above the mean of all ranks is lost to the others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean

from benchmarks import length_sets, script
from zoo.bench.options import Bounded
from zoo.config.compose import load_recipe
from zoo.config.layers.keys import number
from zoo.data.media.sizes import SampleSize
from zoo.errors import UserError
from zoo.model import build
from zoo.packing import deal_bins, plan_bins
from zoo.planner.sample_costs import training_cost

BUDGETS = {"receipts": 8192, "llava-mix": 8192, "long-video": 32768}


@dataclass(frozen=True)
class BalanceOptions(Bounded):
    """What is measured: `count` rows of each set on `ranks` ranks, each of which takes `bins` packed rows a step."""

    recipe: str = "qwen3_vl_sft"
    size: str = "2b"
    count: int = number(100_000, 1, 10**8)
    ranks: tuple[int, ...] = number((8, 64), 1, 10**5)
    bins: int = number(1, 1, 10**4)
    align: int = number(1, 1, 10**6)
    lookahead: int = number(256, 1, 10**6)
    seed: int = number(0, 0, 2**32 - 1)


@dataclass(frozen=True)
class Way:
    """One way to plan one set."""

    name: str
    seconds: float  # of a core for a million rows; 0 where nothing is planned
    unfilled: float  # share of the budget without a real token; 0 where there is none
    worst: dict[int, float]  # ranks -> by what share the one with most work is above the mean, on average over steps
    worst99: dict[int, float]  # the same of the step at the 99th percentile


@dataclass(frozen=True)
class BalanceReport:
    """The ways of each set, by its name."""

    options: BalanceOptions
    sets: dict[str, list[Way]]


def run(options: BalanceOptions) -> BalanceReport:
    """Plan every set in every way; raises UserError for too few rows."""
    recipe = load_recipe(options.recipe, [f"size={options.size}"])
    config = build.assemble(recipe).config
    cost, rows = training_cost(config, recipe), config.tower_costs()["vision"].rows_per_token
    return BalanceReport(options, {name: _set(name, options, cost, rows) for name in length_sets.SETS})


def _set(name: str, options: BalanceOptions, cost: Callable[[SampleSize], int], rows_per_token: float) -> list[Way]:
    rows = length_sets.draw(name, options.count, options.seed)
    lengths = [row.length for row in rows]
    sizes = [SampleSize(row.length, {"vision": [tokens * rows_per_token for tokens in row.items]}) for row in rows]
    costs = [cost(size) for size in sizes]
    budget = BUDGETS[name]
    ways = []
    for way, weights in (("by tokens", None), ("by cost", costs)):
        began = time.thread_time()
        bins = list(plan_bins(lengths, budget, options.align, options.lookahead, weights))
        seconds = (time.thread_time() - began) / options.count * 1e6
        ways.append(_way(way, bins, lengths, costs, budget, seconds, options))
    each = max(1, round(options.count / len(bins)))
    dealt = [list(range(first, first + each)) for first in range(0, options.count - each + 1, each)]
    return [_way("dealt", dealt, lengths, costs, 0, 0.0, options), *ways]


def _way(
    name: str,
    bins: list[list[int]],
    lengths: Sequence[int],
    costs: Sequence[int],
    budget: int,
    seconds: float,
    options: BalanceOptions,
) -> Way:
    # The last bins are what the buffer was left with; a stream has no such end.
    full = bins[: max(1, len(bins) - options.lookahead)]
    tokens = sum(lengths[row] for rows in full for row in rows)
    work = [sum(costs[row] for row in rows) for rows in full]
    worst, worst99 = {}, {}
    for ranks in options.ranks:
        over = _over(work, ranks, options.bins, balanced=name == "by cost")
        if not over:
            raise UserError(f"count={options.count}: too few rows for a step of {ranks} ranks; give more")
        worst[ranks], worst99[ranks] = mean(over), sorted(over)[int(0.99 * len(over))]
    unfilled = 1 - tokens / (len(full) * budget) if budget else 0.0
    return Way(name, seconds, unfilled, worst, worst99)


def _over(work: Sequence[int], ranks: int, each: int, balanced: bool) -> list[float]:
    """By what share the rank with most work is above the mean, of every step."""
    over = []
    for start in range(0, len(work) - ranks * each + 1, ranks * each):
        step = work[start : start + ranks * each]
        shared = deal_bins(step, ranks) if balanced else [range(rank, len(step), ranks) for rank in range(ranks)]
        loads = [sum(step[index] for index in places) for places in shared]
        over.append(max(loads) / mean(loads) - 1)
    return over


def table(report: BalanceReport) -> str:
    """The report as text."""
    options = report.options
    lines = [
        f"{options.count} rows of each set, costs of {options.recipe} size={options.size}, lookahead={options.lookahead}, "
        f"align={options.align}, {options.bins} packed rows a rank and step, seed {options.seed}",
        "worst rank over the mean of all ranks: on average over steps, and in one step of a hundred",
        "",
        f"{'':<24}{'budget':>8}{'unfilled':>10}"
        + "".join(f"{f'{ranks} ranks':>18}" for ranks in options.ranks)
        + f"{'s / million':>13}",
    ]
    for name, ways in report.sets.items():
        for way in ways:
            planned = way.name != "dealt"
            lines.append(
                f"{name + ', ' + way.name:<24}"
                + (f"{BUDGETS[name]:>8}{way.unfilled:>10.2%}" if planned else f"{'':>18}")
                + "".join(f"{way.worst[ranks]:>9.1%}{way.worst99[ranks]:>9.1%}" for ranks in options.ranks)
                + (f"{way.seconds:>13.1f}" if planned else "")
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(script.main(__doc__, BalanceOptions, run, table, asdict))
