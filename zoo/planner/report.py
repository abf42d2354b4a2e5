"""A recipe's plan: parameters by part, bytes of a rank by kind, FLOPs by part, measures that save memory, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial

from zoo.config.derived import STAGED, data_parallel, saves_at_once
from zoo.config.gpus import find_gpu
from zoo.config.schema import Recipe
from zoo.packing.cost import TALKER
from zoo.planner.activations import Row, rows_of_step
from zoo.planner.layouts import ACCURACY, RECOMPUTE, capacity, cpu_capacity
from zoo.planner.memory import Memory, Model, checkpoint_bytes, export_bytes, host_bytes, memory, remainder_bytes
from zoo.planner.rollouts import answers_at_once, rollout_bytes
from zoo.planner.speed import factor, forward_flops
from zoo.planner.vllm import VllmMemory, vllm_memory
from zoo.types import JsonObject

_NAMES = {"adamw": "AdamW", "muon": "Muon"}
_LAYOUT = ("tp", "pp", "vpp", "cp", "ep", "etp")
_MOMENTS = ("train.exp_avg_dtype", "train.exp_avg_sq_dtype")


@dataclass(frozen=True)
class Measure:
    """One measure, and bytes of the fullest rank that it saves, or would save where it is not taken."""

    name: str
    taken: bool
    bytes: float


def measures(model: Model, recipe: Recipe, row: Row, ranks: int, *, fused: bool) -> list[Measure]:
    """All memory measures of a recipe, from cheap to dear; a weaker form of one that is taken is left out."""
    stages = memory(model, recipe, row, ranks, fused=fused)
    worst = max(range(len(stages)), key=lambda stage: stages[stage].total)
    now, listed = stages[worst].total, []
    if recipe.engine.precision == "bf16":  # weights hold the upper half of their fp32 values
        listed.append(Measure("split master weights", True, remainder_bytes(model, recipe, worst, ranks)))
    for name, taken, other in _alternatives(recipe):
        need = max(stage.total for stage in memory(model, other, row, ranks, fused=fused))
        listed.append(Measure(name, taken, max(0.0, need - now if taken else now - need)))
    return [measure for measure in listed if measure.bytes]


def _alternatives(recipe: Recipe) -> Iterator[tuple[str, bool, Recipe]]:
    """Each measure's name, whether the recipe has it, and the recipe without it if so, else with it."""
    train = recipe.train
    if recipe.engine.precision == "bf16":  # never planned: that is the user's choice
        kept = train.main_grads_dtype == "bf16"
        yield ("gradients in bf16", kept, recipe.replace({"train.main_grads_dtype": "fp32" if kept else "bf16"}))
    moments = _MOMENTS, tuple(ACCURACY), train.exp_avg_sq_dtype
    recompute = ("engine.recompute",), RECOMPUTE, recipe.engine.recompute
    offload = ("train.optimizer_offload_fraction",), (0.0, 1.0), float(train.optimizer_offload_fraction > 0)
    ladder = [
        ("moments in bf16", *moments, "bf16"), ("selective recompute", *recompute, "selective"), ("moments in 8 bits", *moments, "fp8"),
        ("optimizer on the host", *offload, 1.0), ("full recompute", *recompute, "full"),
    ]  # fmt: skip
    for name, keys, values, now, value in ladder:
        have, level = values.index(now), values.index(value)
        if have <= level and (values is not offload[1] or train.optimizer == "adamw"):
            other = values[0] if have == level else value
            yield name, have == level, recipe.replace(dict.fromkeys(keys, other))
    if recipe.engine.recompute == "full":
        away = recipe.engine.offload_activations
        yield "layer inputs on the host", away, recipe.replace({"engine.offload_activations": not away})


@dataclass(frozen=True)
class Plan:
    """The parameters, memory and FLOPs of a run."""

    recipe: Recipe  # as it would run
    ranks: int
    parameters: dict[str, int]  # by part, over all ranks; tied weights once
    trained: int
    stages: list[Memory]  # bytes of a rank of each pipeline stage
    forward: dict[str, float]  # FLOPs of a row's forward pass, by part
    step: dict[str, float]  # FLOPs of an optimizer step, over all ranks, by part
    row: Row
    capacity: float | None  # bytes of a rank that may be filled; None where no memory is known
    list_measures: Callable[[], list[Measure]]
    saved: int = 0  # bytes of a checkpoint, of all ranks
    exported: int = 0  # bytes of the export at its end
    host: float = 0.0  # most bytes of CPU memory that a rank on a GPU uses
    teacher: int = 0  # parameters of a teacher in the run
    rollout: float = 0.0  # bytes of a rank's cache and logits while answers are sampled, in place of activations
    vllm: VllmMemory | None = None  # what vLLM fills of a GPU while it generates
    matrices: int = 0  # of the trained weights: those that Muon updates where the recipe has it

    @property
    def optimizer(self) -> dict[str, int]:
        """Trained weights by the optimizer that updates them."""
        by_muon = {"muon": self.matrices} if self.recipe.train.optimizer == "muon" else {}
        return by_muon | {"adamw": self.trained - sum(by_muon.values())}

    @cached_property
    def measures(self) -> list[Measure]:
        """Measures that save memory, from cheap to dear; each is a plan of its own, so they are computed when read."""
        return self.list_measures()

    @property
    def seconds(self) -> float | None:
        """A step's time if the GPUs ran at their peak; None where that is not known."""
        gpu = find_gpu(self.recipe.machine.gpu or "")
        peak = gpu.tflops if gpu else None
        return sum(self.step.values()) / (peak * 1e12 * self.ranks) if peak else None

    @property
    def worst(self) -> Memory:
        """The rank that needs most."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool | None:
        """Whether every rank has room; None where no memory is known."""
        if self.capacity is None:
            return None
        limit, generates = cpu_capacity(self.recipe), self.vllm is None or self.vllm.fits
        return generates and self.worst.total <= self.capacity and (limit is None or self.host <= limit)

    @property
    def checkpoint(self) -> dict[str, int]:
        """Bytes of a save: of all ranks, of one (on the disk, and as its copy in CPU memory), of all that are kept."""
        kept, rank = saves_at_once(self.recipe, self.recipe.train.keep + 1), -(-self.saved // self.ranks)
        return {
            "all": self.saved,
            "rank": rank,
            "host_memory_of_rank": rank,
            "disk": kept * self.saved + self.exported,
            "export": self.exported,
            **({"stage": STAGED * self.saved} if self.recipe.run.stage else {}),
        }

    def as_dict(self) -> JsonObject:
        """Plain values: counts, bytes and FLOPs."""
        recipe, parallel, engine = self.recipe, self.recipe.parallel, self.recipe.engine
        layout: JsonObject = {name: getattr(parallel, name) for name in (*_LAYOUT, "stage_layers")}
        name = "teacher" if recipe.distill.teacher else "reward_model"
        teacher = {name: self.teacher} if self.teacher else {}
        total = sum(self.parameters.values())
        return {
            "recipe": recipe.recipe,
            "size": recipe.size,
            "hardware": recipe.hardware,
            "gpu": _gpu(recipe),
            "ranks": self.ranks,
            "parallel": {**layout, "sp": bool(parallel.sp), "dp": data_parallel(recipe, self.ranks)},
            "recompute": engine.recompute,
            "cuda_graphs": engine.cuda_graphs,
            "precision": engine.precision,
            "global_batch": recipe.train.global_batch,
            "parameters": {**self.parameters, "total": total, "trained": self.trained, **teacher},
            "optimizer": self.optimizer,
            "memory_bytes": [stage.as_dict() for stage in self.stages],
            "room_bytes": self.capacity,
            **({"rollout_bytes": self.rollout} if self.rollout else {}),
            **({"vllm": self.vllm.as_dict()} if self.vllm else {}),
            "host_bytes": {"optimizer": max(stage.host for stage in self.stages), "total": self.host},
            "moments": [recipe.train.exp_avg_dtype, recipe.train.exp_avg_sq_dtype],
            "measures": [asdict(measure) for measure in self.measures],
            "checkpoint_bytes": self.checkpoint,
            "fits": self.fits,
            "row": {
                "tokens": self.row.total,
                "samples": len(self.row.lengths),
                "labels": self.row.labels,
                "media_rows": {name: items.total for name, items in self.row.items.items()},
            },
            "flops": {
                "forward_of_a_row": self.forward,
                "step": {**self.step, "total": sum(self.step.values())},
                "seconds_of_a_step_at_peak": self.seconds,
                "per_token": sum(self.step.values()) / (self.row.total * rows_of_step(recipe, self.row)),
            },
        }


def _gpu(recipe: Recipe) -> JsonObject | None:
    gpu = find_gpu(recipe.machine.gpu or "")
    if gpu is None:
        return None
    return {name: getattr(gpu, name) for name in ("name", "memory_gb", "tflops", "attention", "fp8", "measured")}


def make_plan(
    model: Model, recipe: Recipe, ranks: int, row: Row, *, fused: bool, limit: float | None, saves: bool = False
) -> Plan:
    """The plan of a validated recipe on so many ranks, `limit` bytes each; `saves`: with its checkpoints and export."""
    forward, rows = forward_flops(model, row), rows_of_step(recipe, row)
    step = {name: rows * flops * factor(model, recipe, name, row) for name, flops in forward.items()}
    if recipe.train.optimizer == "muon":
        step["newton_schulz"] = model.parameters.newton_schulz(recipe.parallel.tp)
    return Plan(
        recipe=recipe,
        ranks=ranks,
        parameters=model.parameters.by_part(),
        trained=model.parameters.trained,
        stages=memory(model, recipe, row, ranks, fused=fused),
        forward=forward,
        step=step,
        row=row,
        capacity=limit if limit is not None else capacity(recipe),
        list_measures=partial(measures, model, recipe, row, ranks, fused=fused),
        saved=checkpoint_bytes(model, recipe) if saves else 0,
        exported=export_bytes(model, recipe) if saves else 0,
        host=host_bytes(model, recipe, ranks, row) if recipe.machine.gpus else 0.0,
        teacher=0 if model.teacher is None else model.teacher.total,
        rollout=rollout_bytes(model.text, model.kinds, recipe, row, ranks),
        vllm=vllm_memory(model.parameters.total, model.text, model.kinds, recipe, row),
        matrices=model.parameters.trained_matrices,
    )


def _vllm_lines(plan: Plan, vllm: VllmMemory) -> list[str]:
    """What vLLM fills of a GPU, and what stays beside it."""
    parts = f"weights {vllm.weights / 1e9:.1f}, cache {vllm.cache / 1e9:.1f}"
    held = f"{vllm.answers} answers at once, of {vllm.tokens} tokens with their prompts: {_verdict(vllm.fits)}"
    stays = "zoo's weights stay beside it, gradients and optimizer state are on the host then"
    if not plan.recipe.rl.vllm.sleep:
        stays = "it stays while zoo trains (rl.vllm.sleep=false), and is counted with activations"
    return [f"  vLLM {vllm.share / 1e9:.1f} GB ({parts}), {held}", f"    {stays}"]


def table(plan: Plan) -> str:
    """The plan in a few lines."""
    values = plan.as_dict()
    sizes = {name: size for name, size in values["parallel"].items() if name != "stage_layers"}
    layout = " ".join(f"{name}={size}" for name, size in sizes.items() if size not in (1, False))
    other = "teacher" if plan.recipe.distill.teacher else "reward model"
    gpu, stage_layers = find_gpu(plan.recipe.machine.gpu or ""), plan.recipe.parallel.stage_layers
    stages = f"  layers {'+'.join(map(str, stage_layers))}" if stage_layers else ""
    unit, size = ("GB", 1e9) if plan.worst.total >= 1e9 else ("MB", 1e6)
    lines = [
        f"{plan.recipe.recipe}  size {plan.recipe.size or '-'}  hardware {plan.recipe.hardware or '-'}",
        *([f"{gpu.name}: {gpu.about()}"] if gpu else []),
        f"{plan.ranks} {'rank' if plan.ranks == 1 else 'ranks'}: {layout.replace('True', 'on') or 'no cuts'}  "
        f"recompute={values['recompute']}{'  CUDA graphs' if values['cuda_graphs'] else ''}{stages}  {values['precision']}  global_batch={values['global_batch']}",
        "",
        f"parameters      {_count(values['parameters']['total']):>9}  trained {_count(plan.trained)}",
        *(f"  {name:<13} {_count(count):>9}" for name, count in plan.parameters.items()),
        *([f"{other:<15} {_count(plan.teacher):>9}  its weights are among those of a rank"] * bool(plan.teacher)),
        f"optimizer       {', '.join(f'{_NAMES[name]} {_count(count)}' for name, count in plan.optimizer.items())}",
        "",
        f"{unit} a rank       weights    grads  optimizer  activations     total",
    ]
    for number, stage in enumerate(plan.stages):
        name = f"  stage {number}" if len(plan.stages) > 1 else "  all"
        kinds = (stage.weights, stage.grads, stage.optimizer, stage.activations, stage.total)
        cells = [f"{count / size:>{width}.2f}" for count, width in zip(kinds, (9, 9, 11, 13, 10), strict=True)]
        lines.append(f"{name:<14}{''.join(cells)}")
    if plan.rollout:
        answers, tokens = answers_at_once(plan.recipe, plan.row, plan.ranks)
        lines.append(
            f"  rollouts {plan.rollout / size:.2f}: {answers} answers at once, of {tokens} tokens with their prompts; not at the "
            "time of activations, of which the larger is counted"
        )
    if plan.vllm is not None:
        lines += _vllm_lines(plan, plan.vllm)
    if plan.capacity is not None:
        lines.append(f"  room {plan.capacity / 1e9:.1f} GB: {_verdict(plan.worst.total <= plan.capacity)}")
        for taken, text in ((True, "saves GB:"), (False, "would save GB:")):
            shown = [f"{measure.name} {measure.bytes / 1e9:.1f}" for measure in plan.measures if measure.taken == taken]
            lines += [f"  {text} {', '.join(shown)}"] * bool(shown)
    if plan.host:
        limit, state = cpu_capacity(plan.recipe), max(stage.host for stage in plan.stages)
        node = min(plan.recipe.machine.gpus or 1, plan.ranks) * plan.host / 1e9
        text = f"  host {plan.host / 1e9:.1f} GB a rank, {node:.0f} a node"
        text += f", optimizer state {state / 1e9:.1f} of it" if state else ""
        lines.append(text if limit is None else f"{text}; room {limit / 1e9:.1f}: {_verdict(plan.host <= limit)}")
    if plan.saved:
        save, keep = plan.checkpoint, plan.recipe.train.keep
        only = saves_at_once(plan.recipe, keep + 1) == 1
        kept = "the one at the run's end takes" if only else f"train.keep={keep} and the one being written take"
        lines.append(
            f"  a save {save['all'] / size:.2f} {unit}: {save['rank'] / size:.2f} a rank, and as much of the host's memory; "
            f"{kept} {(save['disk'] - save['export']) / size:.2f} of the disk"
            + (f", the export {save['export'] / size:.2f}" if save["export"] else "")
            + (f", {STAGED} in run.stage {save['stage'] / size:.2f} of the local ones" if "stage" in save else "")
        )
    row = values["row"]
    media = "".join(
        f", {rows:.0f} {'frames of speech' if name == TALKER else f'rows of {name}'}"
        for name, rows in row["media_rows"].items()
        if rows
    )
    samples = "1 sample" if row["samples"] == 1 else f"{row['samples']} samples"
    total = sum(plan.step.values())
    lines += [
        "",
        f"a row: {row['tokens']} tokens in {samples}, {row['labels']} labels{media}",
        "FLOPs           a row, forward     a step",
        *(f"  {name:<13} {_flops(flops):>14} {_flops(plan.step[name]):>10}" for name, flops in plan.forward.items()),
        *(
            f"  {'Newton-Schulz':<13} {'-':>14} {_flops(flops):>10}"
            for name, flops in plan.step.items()
            if name not in plan.forward
        ),
        f"  {'all':<13} {_flops(sum(plan.forward.values())):>14} {_flops(total):>10}",
        f"  {_flops(values['flops']['per_token'])} a token of training, {_flops(total / plan.ranks)} a rank and step",
    ]
    if plan.seconds:
        lines.append(f"  {plan.seconds:.3g} s a step at the GPUs' peak, {plan.seconds / 0.4:.3g} s at 40 % MFU")
    return "\n".join(lines)


def _verdict(fits: bool) -> str:
    return "fits" if fits else "DOES NOT FIT"


def _flops(number: float) -> str:
    return _in_units(number, {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6})


def _count(number: float) -> str:
    return _in_units(number, {"B": 1e9, "M": 1e6, "K": 1e3})


def _in_units(number: float, units: dict[str, float]) -> str:
    """A number in the first unit that is no larger."""
    return next((f"{number / size:.2f} {unit}" for unit, size in units.items() if number >= size), f"{number:.0f}")
