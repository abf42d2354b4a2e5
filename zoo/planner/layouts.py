"""The parallel sizes and recompute that cost least time among those under which a model fits a machine.

What a choice costs is a rough share of a step's time, known from experience rather than measured: enough to prefer
replicas over cutting the model, cuts within a node over stages, and all of that over computing twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log2

from zoo.config.checks.layout import check_layout
from zoo.config.derived import data_parallel, num_experts
from zoo.config.schema import Recipe
from zoo.errors import ConfigError
from zoo.planner.activations import Row
from zoo.planner.memory import Model, fixed, memory

# The share of a GPU's memory that the driver, the communication library and gaps between tensors take.
RESERVED_SHARE, RESERVED_BYTES = 0.06, 2e9
_PER_DOUBLING = {"tp": 0.08, "cp": 0.06, "ep": 0.05}
_RECOMPUTE = {"none": 1.0, "selective": 1.15, "full": 1.33}
_MOST_NODES = 128


@dataclass(frozen=True)
class Candidate:
    """A layout and its share of time lost."""

    recipe: Recipe
    time: float  # of the same step without any cut, 1.0


def room(recipe: Recipe) -> float | None:
    """Bytes of a GPU that a run may fill; None where no GPU's memory is known."""
    size = recipe.machine.memory_gb
    return None if size is None else spare(size * 1e9)


def spare(memory: float) -> float:
    """Bytes of a GPU of that memory that a run may fill."""
    return memory * (1 - RESERVED_SHARE) - RESERVED_BYTES


def choose_layout(model: Model, recipe: Recipe, ranks: int, row: Row) -> Recipe:
    """The recipe with the keys of `parallel.plan` chosen, and nothing left to plan.

    Raises:
        ConfigError: nothing fits; the message says what would.
    """
    if not recipe.parallel.plan:
        return recipe
    found = _first_fit(model, recipe, ranks, row)
    if found is None:
        _refuse_if_all_are_wrong(recipe, ranks)
        raise ConfigError(_what_would(model, recipe, ranks, row))
    return found


def _refuse_if_all_are_wrong(recipe: Recipe, ranks: int) -> None:
    """ConfigError where no choice goes with the architecture and the batch, so that memory is not the cause."""
    refusal: ConfigError | None = None
    for candidate in sorted(candidates(recipe, ranks), key=lambda candidate: candidate.time):
        try:
            check_layout(candidate.recipe, ranks)
        except ConfigError as error:
            refusal = refusal or error
        else:
            return
    raise refusal or ConfigError(
        f"parallel sizes that are given (tp={recipe.parallel.tp}, pp={recipe.parallel.pp}, cp={recipe.parallel.cp}, "
        f"ep={recipe.parallel.ep}, etp={recipe.parallel.etp}) do not divide the {ranks} ranks of the run; change one of them"
    )


def _first_fit(model: Model, recipe: Recipe, ranks: int, row: Row) -> Recipe | None:
    limit = room(recipe)
    for candidate in sorted(candidates(recipe, ranks), key=lambda candidate: candidate.time):
        if limit is not None and fixed(model, candidate.recipe, ranks) > limit:
            continue
        try:
            check_layout(candidate.recipe, ranks)
        except ConfigError:
            continue
        stages = memory(model, candidate.recipe, row, ranks, fused=True)
        if limit is None or max(stage.total for stage in stages) <= limit:
            return candidate.recipe
    return None


def candidates(recipe: Recipe, ranks: int) -> Iterator[Candidate]:
    """Every choice of the keys to be planned, in no order; some may not go with the architecture."""
    plan, parallel = recipe.parallel.plan, recipe.parallel
    node = min(recipe.machine.gpus or ranks, ranks)
    powers = [2**power for power in range(11)]
    choices = {
        "tp": [size for size in powers if size <= min(node, 8)],
        "pp": [size for size in powers if size <= min(ranks, 32)],
        "cp": [size for size in powers if size <= min(node, 8)],
        "ep": [
            size for size in powers if size <= min(ranks, 64) and num_experts(recipe.model.arch) % size == 0
        ],
    }
    if not num_experts(recipe.model.arch):
        choices["ep"] = [1]
    sizes = [choices[name] if name in plan else [getattr(parallel, name)] for name in choices]
    again = list(_RECOMPUTE) if "recompute" in plan else [recipe.engine.recompute]
    for tp, pp, cp, ep in product(*sizes):
        if ranks % (tp * pp * cp) or ranks % (parallel.etp * ep * pp):
            continue
        sp = parallel.sp if parallel.sp is not None else tp > 1
        cut = replace(parallel, tp=tp, pp=pp, cp=cp, ep=ep, sp=sp, plan=[], planned=list(plan))
        layout = replace(recipe, parallel=cut)
        batch = recipe.train.global_batch
        if "batch" in plan:
            unit = data_parallel(layout, ranks) * recipe.train.micro_batch
            batch = -(-batch // unit) * unit
        for how in again:
            chosen = replace(
                layout,
                engine=replace(recipe.engine, recompute=how),
                train=replace(recipe.train, global_batch=batch),
            )
            yield Candidate(chosen, _time(chosen, ranks, node))


def _time(recipe: Recipe, ranks: int, node: int) -> float:
    """Share of time against a step without any cut."""
    parallel = recipe.parallel
    lost = sum(share * log2(getattr(parallel, name)) for name, share in _PER_DOUBLING.items())
    beyond = max(parallel.tp * parallel.cp, parallel.ep) / node
    lost += 0.3 * log2(beyond) if beyond > 1 else 0.0  # exchanges that leave the node
    micro_batches = max(
        1, recipe.train.global_batch // data_parallel(recipe, ranks) // recipe.train.micro_batch
    )
    bubble = (parallel.pp - 1) / (micro_batches * parallel.vpp)
    return (1 + lost) * (1 + bubble) * _RECOMPUTE[recipe.engine.recompute]


def _what_would(model: Model, recipe: Recipe, ranks: int, row: Row) -> str:
    """One sentence: that nothing fits, and the next larger machine or the smaller row that would."""
    size = recipe.machine.memory_gb
    machine = (
        f"{ranks} GPUs of {size:g} GB under any parallel layout" if ranks > 1 else f"a GPU of {size:g} GB"
    )
    text = f"the model does not fit {machine}"
    would = []
    smaller = _smaller_row(model, recipe, ranks, row)
    if smaller is not None:
        would.append(f"packing.budget={smaller}")
    larger = _larger_machine(model, recipe, ranks, row)
    if larger is not None:
        would.append(larger)
    return (
        f"{text}; {' or '.join(would)} would do"
        if would
        else f"{text}; take a smaller size=, or freeze parts of it"
    )


def _smaller_row(model: Model, recipe: Recipe, ranks: int, row: Row) -> int | None:
    for halvings in range(1, 4):
        budget = recipe.packing.budget >> halvings
        if budget < 1024:
            return None
        less = Row(
            _cut(row.lengths, halvings),
            row.labels >> halvings,
            {name: _cut(items, halvings) for name, items in row.media.items()},
        )
        small = replace(recipe, packing=replace(recipe.packing, budget=budget))
        if _first_fit(model, small, ranks, less):
            return budget
    return None


def _cut[N: (int, float)](items: Sequence[N], halvings: int) -> tuple[N, ...]:
    return tuple(items[: max(1, len(items) >> halvings)])


def _larger_machine(model: Model, recipe: Recipe, ranks: int, row: Row) -> str | None:
    machine = recipe.machine
    gpus, nodes = machine.gpus or ranks, machine.nodes
    while nodes <= _MOST_NODES:
        gpus, nodes = (gpus * 2, nodes) if gpus < 8 else (gpus, nodes * 2)
        larger = replace(recipe, machine=replace(machine, gpus=gpus, nodes=nodes))
        if _first_fit(model, larger, gpus * nodes, row):
            return f"{gpus * nodes} such GPUs{f' ({nodes} nodes of {gpus})' if nodes > 1 else ''}"
    return None
