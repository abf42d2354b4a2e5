"""How long the samples of a recipe's data are, and how much of a row would stay empty under several budgets."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from statistics import mean
from typing import TYPE_CHECKING

from zoo.config.schema import Recipe
from zoo.data.loading.sample_source import SampleSource
from zoo.data.sample import IGNORE
from zoo.data.sources.mixture import SampleId
from zoo.packing import plan_bins
from zoo.planner.sample_costs import training_cost
from zoo.tools.inspection.rows import MEDIA
from zoo.types import JsonObject

if TYPE_CHECKING:
    from zoo.model.build import Assembly

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
_NO_LIMIT = 1 << 40


@dataclass(frozen=True)
class Filling:
    """What becomes of the samples under one budget."""

    budget: int  # tokens of a row
    too_long: int  # samples that no row holds
    rows: int
    samples_a_row: float
    unfilled: float  # share of the rows' budget without a token: padding where packing.pad_to is the budget
    alignment: float  # share of the tokens that pad samples to packing.align
    side_by_side: float  # padding of the same samples, as many side by side as a row holds


@dataclass(frozen=True)
class Lengths:
    """Statistics of the samples that were read."""

    samples: int
    left_out: str  # rows that were not usable, by cause
    tokens: dict[str, float]  # of a sample: least, percentiles, most, mean
    labels: float  # share of all tokens with a loss
    media: dict[str, float]  # share of all tokens, by kind
    kinds: dict[str, int]  # samples by kind
    fillings: tuple[Filling, ...]
    lengths: tuple[int, ...]

    def as_dict(self) -> JsonObject:
        """Plain values; the lengths themselves are left out."""
        values = asdict(self)
        del values["lengths"]
        return values


def lengths_of(recipe: Recipe, assembly: Assembly, most: int, budgets: tuple[int, ...] = ()) -> Lengths:
    """Read up to `most` rows of a validated recipe's training data, evenly over all of them.

    `budgets`: those that are tried; by default a quarter of the recipe's to four times as much.
    """
    processor, config = assembly.processor, assembly.config
    budgets = budgets or tuple(max(1, int(recipe.packing.budget * share)) for share in (0.25, 0.5, 1, 2, 4))
    source = SampleSource.open(recipe.data.train, processor, recipe.data, budget=_NO_LIMIT)
    count = most if source.rows.has_stream else len(source)
    chosen = range(count) if count <= most else [round(i * (count - 1) / (most - 1)) for i in range(most)]
    cost = training_cost(config, recipe)
    lengths: list[int] = []
    costs: list[int] = []
    labels, kinds = 0, Counter[str]()
    tokens = {name: token for name in MEDIA if (token := getattr(config.root, f"{name}_token_id", None)) is not None}
    media = dict.fromkeys(tokens, 0)
    for sample_id in map(SampleId, chosen):
        sample = source.sample(sample_id)
        if sample is None:
            continue
        lengths.append(sample.length)
        costs.append(cost(processor.size(sample)))
        labels += int((sample.labels != IGNORE).sum())
        kinds[sample.kind or "-"] += 1
        for name, token in tokens.items():
            media[name] += int(sample.input_ids.eq(token).sum())
    total = max(1, sum(lengths))
    align, lookahead = recipe.packing.align or 1, recipe.data.lookahead
    ordered = sorted(lengths)
    percentiles = {f"p{p}": float(ordered[round(p / 100 * (len(ordered) - 1))]) for p in PERCENTILES}
    return Lengths(
        samples=len(lengths),
        left_out=source.bad_rows.summary(),
        tokens={"least": float(ordered[0]), **percentiles, "most": float(ordered[-1]), "mean": mean(ordered)},
        labels=labels / total,
        media={name: tokens / total for name, tokens in media.items()},
        kinds=dict(kinds),
        fillings=tuple(filling(lengths, budget, align, lookahead, costs) for budget in budgets),
        lengths=tuple(lengths),
    )


def filling(lengths: list[int], budget: int, align: int, lookahead: int, costs: list[int] | None = None) -> Filling:
    """Pack lengths into rows of `budget` tokens, as training does; the last row, which training fills, is not counted
    as unfilled where there are others.
    """
    limit = budget // align * align
    pairs = [pair for pair in zip(lengths, costs or lengths, strict=True) if pair[0] <= limit]
    fitting = [length for length, _ in pairs]
    plan = plan_bins(fitting, budget, align, lookahead, [cost for _, cost in pairs])
    bins = [[fitting[i] for i in positions] for positions in plan]
    real, padded = sum(fitting), sum(-(-length // align) * align for length in fitting)
    whole = bins[:-1] or bins
    held = sum(-(-length // align) * align for lengths_ in whole for length in lengths_)
    wide = sum(len(bin_) * max(bin_) for bin_ in bins)
    return Filling(
        budget=budget,
        too_long=len(lengths) - len(fitting),
        rows=len(bins),
        samples_a_row=len(fitting) / max(1, len(bins)),
        unfilled=1 - held / max(1, len(whole) * budget),
        alignment=1 - real / max(1, padded),
        side_by_side=1 - real / max(1, wide),
    )
