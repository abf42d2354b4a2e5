"""How many weights a model has, where in the pipeline they stand, and how ranks share them.

`zoo.planner.parameter_statistics` takes the counts from the model itself, built without data; here is what follows for a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
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
    position: int | Literal["first", "last"]  # a decoder layer (from 0), or the stage at an end of the pipeline
    cut: Cut  # whole on every rank, over tensor parallel ranks, or over expert and expert tensor parallel ones
    count: int  # numbers in all of them, over all ranks
    trained: bool = True
    matrices: bool = False  # what Muon updates under train.optimizer=muon
    newton_schulz: float = 0.0  # FLOPs to orthogonalise all of them once


@dataclass(frozen=True)
class ParameterStatistics:
    """A whole model."""

    weights: tuple[Weights, ...]
    layers: int  # of the decoder
    tied: bool  # the head is the embedding: with more than one stage, both ends hold it

    @cached_property
    def shares(self) -> dict[tuple[object, ...], Share]:
        """Results of `share`: a search asks for a few hundred shares some hundred thousand times."""
        return {}

    def by_part(self) -> dict[str, int]:
        """Numbers of each part, over all ranks."""
        counts: dict[str, int] = {}
        for weights in self.weights:
            counts[weights.part] = counts.get(weights.part, 0) + weights.count
        return counts

    @cached_property
    def total(self) -> int:
        """All weights, tied ones once."""
        return sum(weights.count for weights in self.weights)

    @cached_property
    def trained(self) -> int:
        """Those that are trained."""
        return sum(weights.count for weights in self.weights if weights.trained)

    @property
    def trained_matrices(self) -> int:
        """Those of them that Muon updates under train.optimizer=muon."""
        return sum(weights.count for weights in self.weights if weights.trained and weights.matrices)

    def newton_schulz(self, tp: int) -> float:
        """FLOPs of Muon in a step, over all ranks; tensor-parallel ranks orthogonalise alike what each of them has whole."""
        trained = [weights for weights in self.weights if weights.trained]
        return sum(weights.newton_schulz * (tp if weights.cut == "whole" else 1) for weights in trained)


@dataclass(frozen=True)
class Share:
    """Weights of one rank; dense ones and experts have replicas in different numbers."""

    dense: int = 0
    experts: int = 0
    trained_dense: int = 0
    trained_experts: int = 0
    copied: int = 0  # dense ones that another stage updates
    dense_matrices: int = 0  # of the trained ones
    experts_matrices: int = 0
    quantised: int = 0  # frozen matrices of decoder layers, where these are held in fewer bits
    widest: int = 0  # of them, those of one layer
    trained_whole: int = 0  # trained ones that are no adapters'


def layers_of(recipe: Recipe, layers: int, stage: int) -> list[int]:
    """Decoder layers of a pipeline stage; with an interleaved schedule it has several runs of them."""
    ends = list(accumulate(stage_layers(recipe, layers)))
    chunks = range(stage, len(ends), recipe.parallel.pp)
    return [layer for chunk in chunks for layer in range(ends[chunk - 1] if chunk else 0, ends[chunk])]


def share(statistics: ParameterStatistics, recipe: Recipe, stage: int) -> Share:
    """The weights of a rank of pipeline stage `stage`."""
    parallel = recipe.parallel
    key = (
        stage, parallel.tp, parallel.pp, parallel.vpp, parallel.ep * parallel.etp, *parallel.stage_layers, recipe.lora.base_dtype,
    )  # fmt: skip
    if key not in statistics.shares:
        statistics.shares[key] = _share(statistics, recipe, stage)
    return statistics.shares[key]


def _share(statistics: ParameterStatistics, recipe: Recipe, stage: int) -> Share:
    parallel = recipe.parallel
    positions: set[int | str] = {*layers_of(recipe, statistics.layers, stage)}
    positions |= {"first"} if stage == 0 else set()
    positions |= {"last"} if stage == parallel.pp - 1 else set()
    divide = {"whole": 1, "tp": parallel.tp, "expert": parallel.ep * parallel.etp}
    ahead = any(weights.part == "multi_token" for weights in statistics.weights)
    totals = {field.name: 0 for field in fields(Share)}
    layers: dict[int, int] = {}
    for weights in statistics.weights:
        # The end of the pipeline has the embedding, too, where it is the head or multi-token prediction reads it.
        copied = weights.part == "embedding" and (statistics.tied or ahead) and "last" in positions
        if weights.position not in positions and not copied:
            continue
        count = weights.count // divide[weights.cut]
        kind = "experts" if weights.cut == "expert" else "dense"
        totals[kind] += count
        totals[f"trained_{kind}"] += count if weights.trained else 0
        totals["trained_whole"] += count if weights.trained and weights.part != ADAPTERS else 0
        totals["copied"] += count if weights.trained and weights.position not in positions else 0
        totals[f"{kind}_matrices"] += count if weights.trained and weights.matrices else 0
        quantised = weights.matrices and not weights.trained and weights.part != ADAPTERS
        if recipe.lora.base_dtype != "model" and quantised and isinstance(weights.position, int):
            layers[weights.position] = layers.get(weights.position, 0) + count
    totals |= {"quantised": sum(layers.values()), "widest": max(layers.values(), default=0)}
    return Share(**totals)
