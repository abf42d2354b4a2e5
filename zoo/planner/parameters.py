"""How many weights a model has, where in the pipeline they stand, and how ranks share them.

`zoo.engine.planning.parameter_statistics` takes the counts from the model itself, built without data; here is what follows for a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from zoo.config.derived import stage_layers
from zoo.config.schema import Recipe

Cut = Literal["whole", "tp", "expert"]
EXPERTS, ADAPTERS = "experts", "adapters"


@dataclass(frozen=True)
class Weights:
    """Parameters that stand in one place and are shared in one way."""

    part: str  # what they are: embedding, decoder, experts, head, multi_token, adapters, or a tower's name
    place: int | Literal["first", "last"]  # a decoder layer (from 0), or the stage at an end of the pipeline
    cut: (
        Cut  # whole on every rank, over tensor parallel ranks, or over expert and expert tensor parallel ones
    )
    count: int  # numbers in all of them, over all ranks
    trained: bool = True


@dataclass(frozen=True)
class ParameterStatistics:
    """A whole model."""

    weights: tuple[Weights, ...]
    layers: int  # of the decoder
    tied: bool  # the head is the embedding: with more than one stage, both ends hold it

    def by_part(self) -> dict[str, int]:
        """Numbers of each part, over all ranks."""
        found: dict[str, int] = {}
        for weights in self.weights:
            found[weights.part] = found.get(weights.part, 0) + weights.count
        return found

    @property
    def total(self) -> int:
        """All weights, tied ones once."""
        return sum(weights.count for weights in self.weights)

    @property
    def trained(self) -> int:
        """Those that are trained."""
        return sum(weights.count for weights in self.weights if weights.trained)


@dataclass(frozen=True)
class Share:
    """Weights of one rank; dense ones and experts have replicas in different numbers."""

    dense: int = 0
    experts: int = 0
    trained_dense: int = 0
    trained_experts: int = 0


def layers_of(recipe: Recipe, layers: int, stage: int) -> list[int]:
    """Decoder layers of a pipeline stage; with an interleaved schedule it has several runs of them."""
    ends = list(accumulate(stage_layers(recipe, layers)))
    chunks = range(stage, len(ends), recipe.parallel.pp)
    return [layer for chunk in chunks for layer in range(ends[chunk - 1] if chunk else 0, ends[chunk])]


def share(statistics: ParameterStatistics, recipe: Recipe, stage: int) -> Share:
    """The weights of a rank of pipeline stage `stage`."""
    parallel = recipe.parallel
    mine: set[int | str] = {*layers_of(recipe, statistics.layers, stage)}
    mine |= {"first"} if stage == 0 else set()
    mine |= {"last"} if stage == parallel.pp - 1 else set()
    divide = {"whole": 1, "tp": parallel.tp, "expert": parallel.ep * parallel.etp}
    ahead = any(weights.part == "multi_token" for weights in statistics.weights)
    sums = dict.fromkeys(("dense", "experts", "trained_dense", "trained_experts"), 0)
    for weights in statistics.weights:
        # The end of the pipeline has the embedding, too, where it is the head or multi-token prediction reads it.
        again = weights.part == "embedding" and (statistics.tied or ahead) and "last" in mine
        if weights.place not in mine and not again:
            continue
        count = weights.count // divide[weights.cut]
        kind = "experts" if weights.cut == "expert" else "dense"
        sums[kind] += count
        sums[f"trained_{kind}"] += count if weights.trained else 0
    return Share(**sums)
