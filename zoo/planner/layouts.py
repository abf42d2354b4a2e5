"""The parallel sizes, pipeline stages and memory measures that cost least time among those under which a model fits a machine.

Time is `zoo.planner.speed`'s estimate. Measures that save memory come from cheap to dear by the time that they take, or by
the share of it in `ACCURACY` that a plan would rather give up than hold AdamW's moments in fewer bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from zoo.config.architecture import num_experts, text_config
from zoo.config.checks.engine import not_captured
from zoo.config.checks.layout import check_layout
from zoo.config.derived import data_parallel, micro_batches, stage_layers
from zoo.config.schema import Recipe
from zoo.config.schema.run import Recompute, StateDtype
from zoo.errors import ConfigError
from zoo.planner.activations import Row, rows_of_step
from zoo.planner.memory import Model, host_bytes, inputs_on_host, least_bytes, memory
from zoo.planner.speed import Speed
from zoo.types import JsonObject

# The share of a GPU's memory that the driver, the communication library and gaps between tensors take.
RESERVED_SHARE, RESERVED_BYTES = 0.06, 2e9
OFFLOAD = (0.0, 0.25, 0.5, 1.0)  # shares of AdamW's state on the host
# Weights a second that the cores of a rank update: 3.2e9 with moments in bf16, 1.7e9 in 8 bits, by 16 threads.
HOST_UPDATE = 2e9
HOST_COPY = 50e9  # bytes a second between a GPU and its host each way, as PCIe 5 has them; not measured
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
ACCURACY: dict[StateDtype, float] = {"fp32": 1.0, "bf16": 1.02, "fp8": 1.3}  # by the format of moments
_ADAPTERS = 0.05  # share of trained weights below which moments are too few to save on
_MOST_NODES = 128


def capacity(recipe: Recipe) -> float | None:
    """Bytes of a GPU that a run may fill; None where no GPU's memory is known."""
    size = recipe.machine.memory_gb
    return None if size is None else gpu_capacity(size * 1e9)


def gpu_capacity(memory: float) -> float:
    """Bytes of a GPU of that memory that a run may fill."""
    return memory * (1 - RESERVED_SHARE) - RESERVED_BYTES


def cpu_capacity(recipe: Recipe) -> float | None:
    """Bytes of CPU memory that a rank may use; None where that is not known."""
    machine = recipe.machine
    if machine.host_memory_gb is None or not machine.gpus:
        return None
    return 0.95 * machine.host_memory_gb * 1e9 / machine.gpus


def choose_layout(model: Model, recipe: Recipe, ranks: int, row: Row) -> Recipe:
    """The recipe with the keys of `parallel.plan` chosen, and nothing left to plan.

    Raises:
        ConfigError: nothing fits; the message says what would.
    """
    if not recipe.parallel.plan:
        return recipe
    chosen = first_fit(model, recipe, ranks, row)
    if chosen is None:
        _refuse_if_all_are_wrong(recipe, ranks)
        raise ConfigError(_what_would(model, recipe, ranks, row))
    return chosen


def _refuse_if_all_are_wrong(recipe: Recipe, ranks: int) -> None:
    """ConfigError where no choice goes with the architecture and the batch, so that memory is not the cause."""
    refusal: ConfigError | None = None
    for layout in _layouts(recipe, ranks):
        try:
            check_layout(layout, ranks)
        except ConfigError as error:
            refusal = refusal or error
        else:
            return
    raise refusal or ConfigError(
        f"parallel sizes that are given (tp={recipe.parallel.tp}, pp={recipe.parallel.pp}, cp={recipe.parallel.cp}, "
        f"ep={recipe.parallel.ep}, etp={recipe.parallel.etp}) do not divide the {ranks} ranks of the run; change one of them"
    )


def first_fit(model: Model, recipe: Recipe, ranks: int, row: Row) -> Recipe | None:
    """The recipe with the fastest choice that fits; None where none does."""
    limit = capacity(recipe)
    for _, candidate in sorted(candidates(model, recipe, ranks, row), key=lambda timed: timed[0]):
        if limit is not None and least_bytes(model, candidate, ranks) > limit:
            continue
        try:
            check_layout(candidate, ranks)
        except ConfigError:
            continue
        if _fits(model, candidate, ranks, row):
            chosen = _with_graphs(model, candidate, ranks, row, sp_is_open=recipe.parallel.sp is None)
            return _with_towers(model, chosen, ranks, row, stages_are_open=not recipe.parallel.stage_layers)
    return None


def _with_graphs(model: Model, recipe: Recipe, ranks: int, row: Row, *, sp_is_open: bool) -> Recipe:
    """The recipe with `engine.cuda_graphs` chosen, if that is planned.

    Nothing is captured under sequence parallelism, so a dense model gives it up for graphs that pay, if `parallel.sp` is open (`sp_is_open`).
    Adapters under tensor parallelism run without graphs, as that has not been tried on GPUs.
    """
    if "graphs" not in recipe.parallel.planned:
        return recipe
    choices = [] if recipe.lora.rank and recipe.parallel.tp > 1 else [recipe]
    if choices and recipe.parallel.sp and sp_is_open and not num_experts(recipe.model.arch):
        choices.append(replace(recipe, parallel=replace(recipe.parallel, sp=False)))
    for choice in choices:
        captured = replace(choice, engine=replace(choice.engine, cuda_graphs=True))
        pays = not_captured(choice) is None and Speed(model, row).launches_longer(choice, ranks)
        if pays and _fits(model, captured, ranks, row, twice=True):
            return captured
    return replace(recipe, engine=replace(recipe.engine, cuda_graphs=False))


def _with_towers(model: Model, recipe: Recipe, ranks: int, row: Row, *, stages_are_open: bool) -> Recipe:
    """The recipe with `parallel.towers` chosen, if that is planned: shared where a step then takes less time, and fits.

    The first stage of a pipeline then has as many layers as others, if `parallel.stage_layers` is open (`stages_are_open`).
    """
    parallel = recipe.parallel
    if "towers" not in parallel.planned or recipe.engine.cuda_graphs:
        return recipe
    stages, speed = [] if stages_are_open else parallel.stage_layers, Speed(model, row)
    shared = replace(recipe, parallel=replace(parallel, towers="shared", stage_layers=stages))
    fastest = min(_with_stages(shared, speed), key=lambda choice: speed.seconds(choice, ranks))
    pays = speed.seconds(fastest, ranks) < speed.seconds(recipe, ranks)
    return fastest if pays and _fits(model, fastest, ranks, row) else recipe


def _fits(model: Model, recipe: Recipe, ranks: int, row: Row, *, twice: bool = False) -> bool:
    """Whether the recipe fits the memory of the host and of every stage's GPU.

    `twice`: with two rows' activations, those in the graphs, which keep their memory, and those of a row that runs without, as of one size too many.
    """
    host, limit = cpu_capacity(recipe), capacity(recipe)
    if host is not None and host_bytes(model, recipe, ranks, row) > host:
        return False
    stages = memory(model, recipe, row, ranks, fused=True)
    most = max(stage.total + (stage.activations if twice else 0.0) for stage in stages)
    return limit is None or most <= limit


def candidates(model: Model, recipe: Recipe, ranks: int, row: Row) -> Iterator[tuple[float, Recipe]]:
    """Every choice of the keys to be planned whose stages have layers, in no order; some may not go with the architecture.

    Each comes after the seconds that a row takes all ranks together.
    """
    speed, layers = Speed(model, row), len(model.kinds)
    states = list(_optimizer_states(model, recipe))
    for layout in _layouts(recipe, ranks):
        if layout.parallel.pp * layout.parallel.vpp > layers:  # a stage without a layer
            continue
        for staged in _with_stages(layout, speed):
            for recompute, away in _recomputes(recipe):
                engine = replace(staged.engine, recompute=recompute, offload_activations=away)
                chosen = replace(staged, engine=engine)
                moved = 2 * max(inputs_on_host(model, chosen, row, stage) for stage in range(chosen.parallel.pp))
                _, fillers = micro_batches(chosen, ranks)
                seconds = speed.seconds(chosen, ranks) * (
                    1 + fillers * chosen.train.micro_batch / chosen.train.global_batch
                )
                for rate, changes in states:
                    train = replace(chosen.train, **changes)
                    updated = model.parameters.trained / ranks * train.optimizer_offload_fraction  # by the host
                    on_host = updated / HOST_UPDATE / rows_of_step(chosen, speed.row)
                    on_host += moved / HOST_COPY / data_parallel(chosen, ranks)
                    yield rate * (seconds + on_host), replace(chosen, train=train)


def _recomputes(recipe: Recipe) -> Iterator[tuple[Recompute, bool]]:
    """Choices of what is recomputed, and whether inputs of layers are on the host; that only where its memory is known, or if asked for."""
    plan, asked = recipe.parallel.plan, recipe.engine.offload_activations
    for recompute in RECOMPUTE if "recompute" in plan else (recipe.engine.recompute,):
        full = recompute == "full"
        yield recompute, asked and full
        if full and not asked and "offload" in plan and cpu_capacity(recipe) is not None:
            yield recompute, True


def _optimizer_states(model: Model, recipe: Recipe) -> Iterator[tuple[float, JsonObject]]:
    """What a choice of the optimizer's state costs, as a factor of time, and its keys of `train`; {}: as the recipe has it.

    Formats are those of AdamW's moments; shares on the host are chosen only where the host's memory is known.
    """
    plan, few = recipe.parallel.plan, model.parameters.trained < _ADAPTERS * model.parameters.total
    formats: list[tuple[float, JsonObject]] = [(1.0, {})]
    if "memory" in plan and not few:
        formats = [(rate, {"exp_avg_dtype": kind, "exp_avg_sq_dtype": kind}) for kind, rate in ACCURACY.items()]
    parts: list[JsonObject] = [{}]
    if "offload" in plan and recipe.train.optimizer == "adamw" and not few and cpu_capacity(recipe) is not None:
        parts = [{"optimizer_offload_fraction": part} for part in OFFLOAD]
    for (rate, moments), part in product(formats, parts):
        yield rate, {**moments, **part}


def _layouts(recipe: Recipe, ranks: int) -> Iterator[Recipe]:
    """Parallel sizes, and the batch that goes with them."""
    plan, parallel, experts = recipe.parallel.plan, recipe.parallel, num_experts(recipe.model.arch)
    node = min(recipe.machine.gpus or ranks, ranks)
    most = {"tp": min(node, 8), "pp": min(ranks, 32), "cp": min(node, 8), "ep": min(ranks, 64) if experts else 1}
    powers = [2**power for power in range(11)]
    choices = {name: [size for size in powers if size <= largest] for name, largest in most.items()}
    choices["ep"] = [size for size in choices["ep"] if experts % size == 0]
    sizes = [choices[name] if name in plan else [getattr(parallel, name)] for name in choices]
    for tp, pp, cp, ep in product(*sizes):
        if ranks % (tp * pp * cp) or ranks % (parallel.etp * ep * pp):
            continue
        sp = parallel.sp if parallel.sp is not None else tp > 1
        sizes_of_layout = replace(parallel, tp=tp, pp=pp, cp=cp, ep=ep, sp=sp, plan=[], planned=list(plan))
        layout = replace(recipe, parallel=sizes_of_layout)
        batch = recipe.train.global_batch
        if "batch" in plan:
            unit = data_parallel(layout, ranks) * recipe.train.micro_batch
            batch = -(-batch // unit) * unit
        yield replace(layout, train=replace(recipe.train, global_batch=batch))


def _with_stages(layout: Recipe, speed: Speed) -> Iterator[Recipe]:
    """The layout with even pipeline stages and, where pp is planned, with fewer layers beside towers and head."""
    yield layout
    parallel, layers = layout.parallel, text_config(layout.model.arch).get("num_hidden_layers") or 0
    stages = parallel.pp * parallel.vpp
    if parallel.pp == 1 or "pp" not in parallel.planned or parallel.stage_layers or layers < stages:
        return
    balanced = speed.balanced(layout, layers)
    if balanced != stage_layers(layout, layers):
        yield replace(layout, parallel=replace(parallel, stage_layers=balanced))


def _what_would(model: Model, recipe: Recipe, ranks: int, row: Row) -> str:
    """One sentence: that nothing fits, and the next larger machine or the smaller row that would."""
    size = recipe.machine.memory_gb
    known = f"{ranks} GPUs of {size:g} GB under any parallel layout" if ranks > 1 else f"a GPU of {size:g} GB"
    if recipe.machine.host_memory_gb is not None:
        without = first_fit(model, recipe.replace({"machine.host_memory_gb": None}), ranks, row)
        budgets = (mb for mb in (2048, 1024, 512, 256) if mb < recipe.data.ahead_mb)
        fits = (mb for mb in budgets if first_fit(model, recipe.replace({"data.ahead_mb": mb}), ranks, row))
        if without is not None and (ahead_mb := next(fits, None)):
            needed = min(ranks, recipe.machine.gpus or ranks) * host_bytes(model, without, ranks, row) / 1e9
            return (
                f"the ranks of a node would take {needed:.0f} GB of its host's memory, and it has "
                f"{recipe.machine.host_memory_gb:g}; data.ahead_mb={ahead_mb} (MiB of samples that a rank makes ahead) would do"
            )
        known += f" and the {recipe.machine.host_memory_gb:g} GB of a node's host"
    text = f"the model does not fit {known}"
    smaller = _smaller_row(model, recipe, ranks, row)
    would = [] if smaller is None else [f"packing.budget={smaller}"]
    gpus, nodes = recipe.machine.gpus or ranks, recipe.machine.nodes
    while nodes <= _MOST_NODES:
        gpus, nodes = (gpus * 2, nodes) if gpus < 8 else (gpus, nodes * 2)
        if first_fit(model, recipe.replace({"machine.gpus": gpus, "machine.nodes": nodes}), gpus * nodes, row):
            would.append(f"{gpus * nodes} such GPUs{f' ({nodes} nodes of {gpus})' if nodes > 1 else ''}")
            break
    return f"{text}; {' or '.join(would)} would do" if would else f"{text}; take a smaller size=, or freeze parts of it"


def _smaller_row(model: Model, recipe: Recipe, ranks: int, row: Row) -> int | None:
    for halvings in range(1, 4):
        budget = recipe.packing.budget >> halvings
        if budget < 1024:
            return None
        media = {name: _cut(items, halvings) for name, items in row.media.items()}
        less = Row(_cut(row.lengths, halvings), row.labels >> halvings, media)
        if first_fit(model, recipe.replace({"packing.budget": budget}), ranks, less):
            return budget
    return None


def _cut[N: (int, float)](items: Sequence[N], halvings: int) -> tuple[N, ...]:
    return tuple(items[: max(1, len(items) >> halvings)])
