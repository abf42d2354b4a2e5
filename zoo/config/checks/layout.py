"""Checks of the layout: parallel sizes against the ranks, the architecture and the batch; packing against alignment."""

from __future__ import annotations

from math import isqrt, prod

from zoo.config.architecture import num_experts, text_config
from zoo.config.derived import alignment, data_parallel
from zoo.config.layers.keys import show_value
from zoo.config.schema import Recipe
from zoo.errors import ConfigError
from zoo.types import JsonMapping


def check_layout(recipe: Recipe, world_size: int) -> None:
    """ConfigError where the parallel sizes don't go with the ranks, the architecture or the batch."""
    parallel, ranks = recipe.parallel, "1 rank" if world_size == 1 else f"{world_size} ranks"
    for names in (("tp", "pp", "cp"), ("etp", "ep", "pp")):
        product = prod(getattr(parallel, name) for name in names)
        if world_size % product:
            sizes = " * ".join(f"{name}={getattr(parallel, name)}" for name in names)
            raise ConfigError(
                f"parallel.{sizes} = {product} does not divide the {ranks} of the run; "
                f"{_listed(_divisors(world_size))} would, or nproc={_next_multiple(world_size, product)}"
            )
    if parallel.sp and parallel.tp == 1:
        raise ConfigError(
            "parallel.sp=true with parallel.tp=1: sequence parallel shares the tokens out over tensor-parallel "
            "ranks; give parallel.tp=2 or more, or leave parallel.sp open"
        )
    if parallel.vpp > 1 and parallel.pp == 1:
        raise ConfigError(f"parallel.vpp={parallel.vpp} needs pipeline stages: give parallel.pp=2 or more, or vpp=1")
    _check_sizes(recipe)
    _check_batch(recipe, world_size)


def _check_sizes(recipe: Recipe) -> None:
    """Parallel sizes against the architecture; what the config leaves to its defaults is not checked here."""
    parallel, text = recipe.parallel, text_config(recipe.model.arch)
    if recipe.model.arch:
        _check_experts(recipe, num_experts(recipe.model.arch))
    layers = text.get("num_hidden_layers")
    _check_heads(parallel.tp, text, "the model")
    width = None if all_sparse(recipe, text) else text.get("intermediate_size")
    if width and width % parallel.tp:
        raise ConfigError(
            f"parallel.tp={parallel.tp} does not divide the model's intermediate_size {width}; "
            f"{_listed(_divisors(width))} would"
        )
    if recipe.train.speech_loss:
        _check_talker(recipe)
    if "linear_attention" in (text.get("layer_types") or ()):  # every rank needs heads of its own
        ranks = parallel.tp * parallel.cp
        for key in ("linear_num_key_heads", "linear_num_value_heads"):
            if (heads := text.get(key)) and heads % ranks:
                raise ConfigError(
                    f"parallel.tp={parallel.tp} * cp={parallel.cp} = {ranks} does not divide the model's {key} {heads}: every "
                    f"rank needs linear attention heads of its own; a product of {_listed(_divisors(heads))} would"
                )
    _check_stages(recipe, layers)


def _check_heads(tp: int, text: JsonMapping, whose: str) -> None:
    heads = text.get("num_attention_heads")
    if not heads:
        return
    groups = text.get("num_key_value_heads") or heads
    fitting = [size for size in _divisors(heads) if groups % size == 0 or size % groups == 0]
    full = text.get("num_global_key_value_heads")  # values that are keys are not given to two ranks
    fitting = [size for size in fitting if not full or full % size == 0]
    if tp not in fitting:
        raise ConfigError(
            f"parallel.tp={tp} does not divide the {heads} attention heads and {groups} key-value "
            f"heads of {whose}; {_listed(fitting)} would"
        )


def _check_talker(recipe: Recipe) -> None:
    """Parallel sizes against a talker's decoders."""
    parallel, talker = recipe.parallel, recipe.model.arch.get("talker_config") or {}
    text, predictor = talker.get("text_config", talker), talker.get("code_predictor_config") or {}
    _check_heads(parallel.tp, text, "the talker")
    _check_heads(parallel.tp, predictor, "the talker's code predictor")
    experts = num_experts(text)
    shared = {
        "the talker's experts": (experts, "ep"),
        "the width of the talker's experts": (text.get("moe_intermediate_size") if experts else 0, "etp"),
        "the width of the talker's shared expert": (text.get("shared_expert_intermediate_size"), "tp"),
        "the talker's intermediate_size": (0 if experts else text.get("intermediate_size"), "tp"),
        "the code predictor's intermediate_size": (predictor.get("intermediate_size"), "tp"),
        "the code predictor's codes": (predictor.get("vocab_size"), "tp"),
    }
    for whose, (count, name) in shared.items():
        if count and count % (size := getattr(parallel, name)):
            raise ConfigError(
                f"parallel.{name}={size} does not divide {whose}, {count}; {_listed(_divisors(count))} would"
            )


def _check_stages(recipe: Recipe, layers: int | None) -> None:
    """Each pipeline stage, and each of its chunks, has layers."""
    parallel, cut = recipe.parallel, recipe.parallel.stage_layers
    stages = parallel.pp * parallel.vpp
    if cut and len(cut) != stages:
        raise ConfigError(
            f"parallel.stage_layers={show_value(cut)}: wanted {stages} numbers (parallel.pp={parallel.pp} * "
            f"vpp={parallel.vpp}); parallel.stage_layers=[] derives them"
        )
    if layers and layers < stages:
        raise ConfigError(
            f"parallel.pp={parallel.pp} * vpp={parallel.vpp} = {stages} stages for the {layers} layers of the model: "
            f"each needs one at least; lower parallel.pp or vpp"
        )
    if layers and cut and sum(cut) != layers:
        raise ConfigError(
            f"parallel.stage_layers={show_value(cut)} are {sum(cut)} layers and the model has {layers}; "
            f"parallel.stage_layers=[] derives them"
        )


def all_sparse(recipe: Recipe, text: JsonMapping) -> bool:
    """Whether every layer has experts, so that `intermediate_size` is nobody's."""
    some = bool(num_experts(recipe.model.arch))
    return some and not text.get("mlp_only_layers") and text.get("decoder_sparse_step", 1) == 1


def _check_experts(recipe: Recipe, experts: int) -> None:
    parallel = recipe.parallel
    if not experts and (parallel.ep > 1 or parallel.etp > 1):
        raise ConfigError(f"parallel.ep={parallel.ep}, etp={parallel.etp}: the model has no experts; set both to 1")
    if experts and experts % parallel.ep:
        raise ConfigError(
            f"parallel.ep={parallel.ep} does not divide the {experts} experts of the model; "
            f"{_listed(_divisors(experts))} would"
        )
    width = text_config(recipe.model.arch).get("moe_intermediate_size")
    if experts and width and width % parallel.etp:
        raise ConfigError(
            f"parallel.etp={parallel.etp} does not divide the experts' width {width}; {_listed(_divisors(width))} would"
        )
    if experts and parallel.tp > 1 and not parallel.sp:
        raise ConfigError(
            f"parallel.sp=false with parallel.tp={parallel.tp}: a model with experts needs sequence parallel "
            f"under tensor parallel; leave parallel.sp open or set it to true"
        )


def _check_batch(recipe: Recipe, world_size: int) -> None:
    train = recipe.train
    if recipe.packing.mode == "thd" and train.micro_batch != 1:
        raise ConfigError(
            f"train.micro_batch={train.micro_batch} with packing.mode=thd: a packed row counts as 1; set it to 1 "
            f"and widen the row with packing.budget"
        )
    if train.global_batch % train.micro_batch:
        raise ConfigError(
            f"train.global_batch={train.global_batch} is no multiple of train.micro_batch={train.micro_batch}; "
            f"{_around(train.global_batch, train.micro_batch)} would work"
        )
    replicas = data_parallel(recipe, world_size)
    unit = recipe.rl.updates * replicas
    if recipe.rl.algorithm and train.global_batch % unit:
        raise ConfigError(
            f"train.global_batch={train.global_batch} prompts are no multiple of {unit} = rl.updates={recipe.rl.updates} * "
            f"{replicas} data-parallel replicas; {_around(train.global_batch, unit)} would work"
        )
    if replicas * train.micro_batch > train.global_batch:
        raise ConfigError(
            f"train.global_batch={train.global_batch} has no micro-batch of train.micro_batch={train.micro_batch} for each of "
            f"{replicas} data-parallel replicas; {replicas * train.micro_batch} would do, or fewer ranks"
        )


def check_packing(recipe: Recipe) -> None:
    packing = recipe.packing
    needed = alignment(recipe)
    assert packing.align is not None  # derived
    if packing.align % needed:
        raise ConfigError(
            f"packing.align={packing.align}: wanted a multiple of {needed} (parallel.cp={recipe.parallel.cp}, "
            f"parallel.tp={recipe.parallel.tp}, sp={show_value(recipe.parallel.sp)}); packing.align=null derives it"
        )
    if packing.pad_to is not None and packing.pad_to % packing.align:
        raise ConfigError(
            f"packing.pad_to={packing.pad_to} is no multiple of the alignment {packing.align}; "
            f"{_around(packing.pad_to, packing.align)} would work"
        )
    if packing.pad_to is not None and packing.pad_to < packing.budget:
        raise ConfigError(
            f"packing.pad_to={packing.pad_to} is less than packing.budget={packing.budget}: a full row would not "
            f"fit; set both to the same number"
        )


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _next_multiple(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _around(number: int, unit: int) -> str:
    """The multiples of `unit` next to `number`: "8 or 16"."""
    above = _next_multiple(number, unit)
    return f"{above - unit} or {above}" if above > unit else f"{above}"


def _listed(numbers: list[int]) -> str:
    """Numbers as text, "1, 2 or 4"; the middle of a long list is left out."""
    shown = [str(number) for number in numbers]
    if len(shown) > 10:
        shown = [*shown[:6], "...", *shown[-2:]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
