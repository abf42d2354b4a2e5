"""Plans of recipes: the model's parameters and costs, from config and code, given to the arithmetic of `zoo.planner`.

A recipe is planned in three places: `zoo plan` shows the plan, `zoo train` chooses the keys of `parallel.plan` before it
starts ranks (zoo.planner.plan_process), and the first rank refuses a model that cannot fit before it builds anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

from zoo.config.checks.effects import refuse_without_effect
from zoo.config.compose import load_recipe
from zoo.config.derived import STAGED, saves_at_once, stage_folder, teacher_on_disk
from zoo.config.devices import cores, gpu_count, gpu_memory
from zoo.config.files import AUTO, CPU
from zoo.config.layers.layer import Overrides
from zoo.config.locate import is_hub_id, locate, read_arch
from zoo.config.memory import host_memory, limits
from zoo.config.recipes.published import arch_of_hub
from zoo.config.schema import Recipe
from zoo.config.schema.run import Recompute
from zoo.config.validate import validate
from zoo.errors import ConfigError, size
from zoo.parallel.megatron.core_import import import_core
from zoo.parallel.process_state import preserve_process_state
from zoo.planner import memory as planned_memory
from zoo.planner.activations import Row, typical_row
from zoo.planner.layouts import choose_layout, gpu_capacity
from zoo.planner.memory import Memory, Model, TalkerModel, export_bytes
from zoo.planner.parameters import ParameterStatistics
from zoo.planner.report import Plan, make_plan
from zoo.registry import get_family

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from zoo.nn.family import FamilyConfig

PROCESS = 2_500_000_000  # bytes of address space that threads and process groups of a rank take on a CPU
SURE = 20.0  # a run whose rough estimate is so many times below what there is needs no plan to fit


def model_of(recipe: Recipe) -> Model:
    """The model of a recipe, which has to have `model.arch`."""
    import_core()
    from zoo.nn.family import SpeakingConfig
    from zoo.nn.flops import layer_kinds, model_cost
    from zoo.planner.parameter_statistics import parameter_statistics

    config: FamilyConfig = get_family(recipe.model.family).load("config").from_arch(recipe.model.arch)
    parameters, teacher, kinds = parameter_statistics(recipe), _teacher(recipe), layer_kinds(config.text)
    cost, mtp, talker = model_cost(config, recipe), config.mtp_layers(recipe), None
    if cost.talker is not None:
        assert isinstance(config, SpeakingConfig) and config.talker is not None
        own = config.talker
        residual, of_frames = own.residual, () if own.residual is None else layer_kinds(own.residual)
        talker = TalkerModel(
            _sizes(own.text), own.traits, layer_kinds(own.text), None if residual is None else _sizes(residual), of_frames,
            own.codebooks, own.projection.kept, config.accepted,
        )  # fmt: skip
    return Model(
        parameters, cost, _sizes(config.text), config.traits, kinds, config.deepstack_layers, mtp, teacher, talker
    )


def _sizes(text: PretrainedConfig) -> Any:
    """Attributes that are quick to read: a search reads them a hundred thousand times."""
    names = {*text.to_dict(), *text.attribute_map}
    return SimpleNamespace(**{name: getattr(text, name, None) for name in names})


def _teacher(recipe: Recipe) -> ParameterStatistics | None:
    """The parameters of a teacher or reward model in the run; None without one, or where its architecture is not known here."""
    from zoo.planner.parameter_statistics import parameter_statistics

    key, folder = (
        ("rl.reward_model", recipe.rl.reward_model)
        if recipe.rl.algorithm
        else ("distill.teacher", recipe.distill.teacher)
    )
    if folder is None or teacher_on_disk(recipe):
        return None
    arch = {} if is_hub_id(folder) else read_arch(locate(folder).files, f"{key}={folder}")
    changes = {"model.init": folder, "model.arch": arch, key: None, "train.mtp_loss": 0.0}
    if recipe.rl.algorithm:
        changes |= {"rl.algorithm": None, "rl.reference": None, "train.loss": "reward"}
    theirs = as_planned(
        recipe.replace(
            {**changes, "lora.rank": 0, "lora.init": None, "lora.merge_first": None, "lora.base_dtype": "model"}
        )
    )
    return None if theirs is None else parameter_statistics(theirs)


@preserve_process_state()
def plan(
    recipe: Recipe | str | Path,
    ranks: int | None = None,
    *,
    overrides: Overrides = (),
    labels: float | None = None,
    media: float | None = None,
    frames: float | None = None,
    on_this_machine: bool | None = None,
) -> Plan:
    """The plan of a recipe on so many ranks, with the keys of `parallel.plan` chosen where any fits.

    Args:
        recipe: as `zoo.load_recipe` takes it: a `zoo.Recipe`, composed or built by hand, a recipe's name, or a path of its file.
        ranks: default: those of the recipe's hardware, or of this machine.
        overrides: of the recipe's keys, as `zoo.load_recipe` takes them.
        labels: share of a row's tokens that have a loss; default: the one in `zoo.planner.activations`.
        media: share of a row's tokens that belong to media; default: the one in `zoo.planner.activations`.
        frames: of speech for each token with a loss, where a talker is trained; default: as many as are spoken at an even pace.
        on_this_machine: the ranks are this machine's, which has to have the packages that the recipe's keys need; default: where `hardware`
            names no other machine.

    Raises:
        ConfigError: the recipe does not fit that many ranks, or the architecture is not known here.
    """
    recipe = load_recipe(recipe, overrides)
    refuse_without_effect(recipe)
    ranks = planned_ranks(recipe) if ranks is None else ranks
    on_this_machine = recipe.hardware in (None, AUTO, CPU) if on_this_machine is None else on_this_machine
    recipe = with_architecture(recipe)
    model = model_of(recipe)
    asked = {"labels": labels, "media": media, "frames": frames}
    shares = {name: share for name, share in asked.items() if share is not None}
    if type(ranks) is not int or not 1 <= ranks < 10**9:
        raise ConfigError(f"ranks={ranks!r}: wanted a whole number above 0")
    row = typical_row(recipe, model.cost, **shares)
    recipe = validate(choose_layout(model, recipe, ranks, row), ranks, on_this_machine=on_this_machine)
    fused = recipe.engine.precision == "bf16"
    limit = None if recipe.machine.memory_gb else _memory_limit(ranks)
    return make_plan(model, recipe, ranks, row, fused=fused, limit=limit, saves=True)


def planned_ranks(recipe: Recipe) -> int:
    """Ranks of the hardware a recipe names, else those a run would have here."""
    machine = recipe.machine
    if recipe.nproc is not None:
        return recipe.nproc * machine.nodes
    if machine.gpus:
        return machine.gpus * machine.nodes
    return gpu_count() or min(recipe.nproc_cpu, cores())


def refuse_misfit(recipe: Recipe, ranks: int, local_ranks: int) -> None:
    """ConfigError where a rank of a validated recipe needs more memory than it can have, by the lowest estimate.

    The estimate has weights, gradients, optimizer state, and the activations of a row without media and with few labels.
    Where the machine's memory is not known, nothing is refused, and no run is planned that surely fits.
    """
    for address_space in limits():  # process groups without it for their threads hang, or end the process
        if address_space.own and address_space.left < PROCESS:
            raise ConfigError(
                f"{address_space.name} is {size(address_space.total)} and {size(address_space.left)} are left; a rank takes "
                f"{size(PROCESS)} for its libraries and threads, beside the model: raise it"
            )
    limit, planned = _memory_limit(local_ranks), as_planned(recipe)
    if limit is None or planned is None or _surely_fits(planned, limit):
        return
    model = model_of(planned)
    fused = gpu_count() > 0 and recipe.engine.precision == "bf16"
    tokens = recipe.packing.budget // 2
    row = Row((tokens,), tokens // 10, {})  # about as small as the smallest of a run: text, a tenth of it labelled
    least = make_plan(model, recipe, ranks, row, fused=fused, limit=limit)
    if least.worst.total > limit:
        raise ConfigError(_misfit(least, gpu_count() > 0))
    saved = planned_memory.checkpoint_bytes(model, recipe)
    state = max(stage.host for stage in least.stages)
    _refuse_small_host(saved / ranks, 0.0 if gpu_count() else least.worst.total, local_ranks, state)
    _refuse_small_disk(recipe, saved, export_bytes(model, recipe))
    _refuse_small_stage(recipe, saved * local_ranks // ranks)


def _surely_fits(recipe: Recipe, limit: float) -> bool:
    """Whether memory and disk are SURE times what a recipe's model takes by its FLOPs, as for the tiny sizes."""
    if recipe.distill.teacher is not None or recipe.run.stage is not None:
        return False
    import_core()
    from zoo.nn.flops import model_cost

    config: FamilyConfig = get_family(recipe.model.family).load("config").from_arch(recipe.model.arch)
    text, cost = config.text, model_cost(config, recipe)
    experts = getattr(text, "num_experts", None) or 1
    rows = 3.0 * text.vocab_size * text.hidden_size  # embedding, head, and those of multi-token prediction
    per_token = cost.decoder.per_token + (cost.talker.decoder.per_token + cost.talker.per_frame if cost.talker else 0.0)
    weights = rows + per_token / 2 * experts + sum(tower.per_row / 2 for tower in cost.towers.values())
    tokens = recipe.packing.budget * recipe.train.micro_batch
    activations = 4.0 * tokens * (64 * text.hidden_size * text.num_hidden_layers + text.vocab_size)
    on_disk = (recipe.train.keep + 2) * (16 * weights + 2**20)  # with the one that is being written, and the export
    return SURE * (32 * weights + activations) < limit and SURE * on_disk < _free(Path(recipe.run.dir or "."))


def _refuse_small_host(copy: float, training: float, local_ranks: int, state: float = 0.0) -> None:
    """A save copies a rank's tensors to CPU memory, which has optimizer `state`, and without a GPU the rest (`training`) too."""
    memory = host_memory(local_ranks, PROCESS)
    if memory and copy + state + training > memory:
        raise ConfigError(
            f"a save copies {size(copy)} of each rank to the host's memory, where a rank has {size(memory)} to give"
            + (f" and training takes {size(training)}" if training else "")
            + (f" and optimizer state {size(state)}" if state else "")
            + "; use more hosts or ranks, or train.save=weights"
            + (", or set train.optimizer_offload_fraction lower" if state else "")
        )


def _refuse_small_disk(recipe: Recipe, checkpoint: int, export: int = 0) -> None:
    """ConfigError for a disk that can't hold the checkpoints to keep, the one that is being written, and the export."""
    train, folder = recipe.train, Path(recipe.run.dir or ".")
    count, free = saves_at_once(recipe, train.keep + 1), _free(folder)
    needed = count * _on_disk(checkpoint) + (_on_disk(export) if export else 0)
    if needed > free + _held(folder):
        raise ConfigError(
            f"{folder}: a checkpoint takes about {size(checkpoint)}, {count} of them are there at once (train.keep={train.keep}, "
            f"and the one that is written), "
            + (f"the export {size(export)}, " if export else "")
            + f"and the disk has {size(free)} left; free some, set train.keep lower, take train.save=weights, or another run.dir"
        )


def _refuse_small_stage(recipe: Recipe, part: int) -> None:
    """ConfigError for a local disk that can't hold this node's `part` (bytes) of the checkpoints in run.stage, next to those of run.dir."""
    folder = stage_folder(recipe)
    if folder is None:
        return
    free, count, run_dir = _free(folder), saves_at_once(recipe, STAGED), Path(recipe.run.dir or ".")
    shared = _device(folder) == _device(run_dir)
    kept = saves_at_once(recipe, recipe.train.keep + 1)
    of_run_dir = max(0, kept * _on_disk(part) - _held(run_dir)) if shared else 0
    if count * _on_disk(part) + of_run_dir > free + _held(folder):
        raise ConfigError(
            f"run.stage={recipe.run.stage}: this node's part of a checkpoint takes about {size(part)}, {count} of them are there at "
            f"once, {'beside those of run.dir on the same disk, ' if shared else ''}and the disk has {size(free)} left; free some, "
            "take train.save=weights, or another run.stage"
        )


def _on_disk(tensors: int) -> int:
    """Bytes that a folder of so many bytes of tensors takes: with the files beside them, and what the file system needs itself."""
    return int(tensors * 1.02) + 2**20


def _existing(folder: Path) -> Path:
    """The folder, or the closest one above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _free(folder: Path) -> int:
    """Bytes left on the disk of a folder that may not be there yet."""
    return shutil.disk_usage(_existing(folder)).free


def _held(folder: Path) -> int:
    """Bytes of the checkpoints in a folder."""
    files = (file for file in folder.glob("checkpoints/*/*") if not file.parent.name.startswith("left_"))
    return sum(file.stat().st_size for file in files if file.is_file())


def _device(folder: Path) -> int:
    return _existing(folder).stat().st_dev


def shortage(recipe: Recipe, ranks: int, *, on_gpu: bool) -> str:
    """A message about a validated recipe that ran out of memory: the estimate for a rank, and settings that need less.

    It names settings that save a tenth or more, each with its estimate, best first; '' where the architecture is not
    known.
    """
    planned = as_planned(recipe)
    if planned is None:
        return ""
    model, fused = model_of(planned), on_gpu and recipe.engine.precision == "bf16"

    def needs(recipe: Recipe) -> Memory:
        stages = planned_memory.memory(model, recipe, typical_row(recipe, model.cost), ranks, fused=fused)
        return max(stages, key=lambda stage: stage.total)

    now = needs(planned)
    leaner = ((needs(other).total, text) for text, other in _leaner(planned))
    better = sorted((need, text) for need, text in leaner if need < 0.9 * now.total)
    parts = ", ".join(f"{kind} {size(need)}" for kind, need in now.as_dict().items() if kind != "total")
    settings = ", ".join(f"{text} would make it {size(need)}" for need, text in better[:3])
    more = "more GPUs with parallel.tp, pp, cp or ep" if on_gpu else "GPUs, or a smaller size="
    return (
        f"a rank was estimated to need {size(now.total)} ({parts}); {settings or 'most of it is the model itself'}; "
        f"else take {more} (`zoo plan` shows what each needs)"
    )


def _leaner(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Settings that take less memory for the same model on the same ranks."""
    levels = get_args(Recompute)
    for level in levels[levels.index(recipe.engine.recompute) + 1 :]:
        yield f"engine.recompute={level}", replace(recipe, engine=replace(recipe.engine, recompute=level))
    packing, train = recipe.packing, recipe.train
    half = (packing.budget if packing.mode == "thd" else train.micro_batch) // 2
    if packing.mode == "thd":
        pad_to = None if packing.pad_to is None else packing.pad_to // 2
        yield f"packing.budget={half}", replace(recipe, packing=replace(packing, budget=half, pad_to=pad_to))
    elif half:
        yield f"train.micro_batch={half}", replace(recipe, train=replace(train, micro_batch=half))


def checkpoint_bytes(recipe: Recipe) -> int | None:
    """About how large a checkpoint of a recipe is, in bytes: weights, and AdamW's state of the trained ones."""
    planned = as_planned(recipe)
    return None if planned is None else planned_memory.checkpoint_bytes(model_of(planned), recipe)


def _misfit(plan: Plan, on_gpu: bool) -> str:
    worst, limit = plan.worst, plan.capacity or 0.0
    device = "GPU" if on_gpu else "rank of this machine"
    parts = ", ".join(
        f"{kind} {size / 1e9:.1f}" for kind, size in worst.as_dict().items() if kind != "total" and size > 1e8
    )
    if worst.total - worst.activations < 0.8 * limit:
        fix = "set packing.budget lower, or engine.recompute=full"
    elif on_gpu:
        fix = "use more GPUs, or cut the model further: hardware=auto chooses parallel.tp, pp, cp and ep"
    else:
        fix = "take a smaller size=, or train on GPUs"
    return (
        f"the model needs at least {worst.total / 1e9:.1f} GB a rank ({parts}) and a {device} has {limit / 1e9:.1f} GB to give; {fix}; "
        f"`zoo plan` shows it in parts"
    )


def _memory_limit(local_ranks: int) -> float | None:
    """Bytes that a rank may fill on this machine; None where they are not known."""
    if gpu_count():
        return gpu_capacity(gpu_memory())
    memory = host_memory(local_ranks, PROCESS)
    return memory * 0.95 if memory else None


def choose_layout_here(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe with the keys of `parallel.plan` chosen in this process; see `zoo.planner.plan_process`.

    Where the architecture is not known (a hub id without a connection), sizes stay as they are.
    """
    planned = as_planned(recipe)
    if planned is None:
        return replace(recipe, parallel=replace(recipe.parallel, plan=[]))
    model = model_of(planned)
    chosen = choose_layout(model, planned, ranks, typical_row(planned, model.cost))
    return replace(chosen, model=recipe.model)


def with_architecture(recipe: Recipe) -> Recipe:
    """The recipe with the architecture of its weights; ConfigError where that is not known."""
    planned = as_planned(recipe)
    if planned is None:
        raise ConfigError(
            f"model.init={recipe.model.init}: its config.json is neither here nor to be had from the hub, so its "
            f"architecture is not known; give a folder, or model.init=random and size="
        )
    return planned


def as_planned(recipe: Recipe) -> Recipe | None:
    """The recipe with the architecture of its weights; None where that is not known."""
    init = recipe.model.init
    if init == "random" or not is_hub_id(init):
        return recipe if recipe.model.arch else None
    try:
        arch = arch_of_hub(init, "model.init").arch
    except ConfigError:  # the same error is reported when the weights are loaded
        return None
    return None if arch is None else replace(recipe, model=replace(recipe.model, arch=arch))
