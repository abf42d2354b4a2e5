"""Checks of a whole recipe against the number of ranks, and the defaults that follow from other keys.

Runs before anything is loaded or started. Every refusal is one sentence that names the keys, the values and
what would work. :func:`validate` may be called again on its own result.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from math import isqrt, lcm
from pathlib import Path
from typing import Any

from zoo.config.arch import check_arch
from zoo.config.devices import gpu_count
from zoo.config.entries import check_entries
from zoo.config.files import read_size
from zoo.config.layers.keys import keys, nearest, nearest_keys, sections, show_value
from zoo.config.locate import is_hub_id
from zoo.config.schema import Recipe
from zoo.errors import ConfigError
from zoo.files import expanded
from zoo.registry import get_family

TE_IN_FP32 = (
    "engine.backend=te with engine.precision=fp32: Transformer Engine rounds fp32 to TF32 (10 bits) in its products; use "
    "engine.backend=torch, or engine.precision=bf16"
)
PLANNED = ("tp", "pp", "cp", "ep", "recompute", "batch")  # what parallel.plan may name


def validate(recipe: Recipe, world_size: int) -> Recipe:
    """`recipe` with its derived defaults filled in: run.dir, parallel.sp, packing.align, engine.precision.

    Raises:
        ConfigError: the recipe cannot run on `world_size` ranks; the message says why and what would.
        UnknownFamilyError: no package registers `model.family`.
    """
    recipe = _with_arch(recipe.replace())  # types and choices, for a recipe that was built by hand
    check_arch(recipe.model.arch, "model.arch")
    _check_values(recipe)
    _check_model(recipe)
    _check_lora(recipe)
    _check_length(recipe)
    _check_accepted(recipe)
    recipe = recipe.replace(_derived(recipe))
    check_layout(recipe, world_size)
    _check_packing(recipe)
    _check_engine(recipe)
    if recipe.log.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"log.wandb={recipe.log.wandb}: Weights & Biases is not installed; pip install 'zoo-train[wandb]', "
            f"or leave log.wandb out"
        )
    return recipe


def _check_accepted(recipe: Recipe) -> None:
    for name in recipe.run.accept_changes:
        if name not in keys(Recipe) and name not in sections(Recipe) and not name.startswith("model.arch."):
            near = ", ".join(nearest_keys(Recipe, name))
            hint = f"nearest: {near}" if near else "`zoo show --schema` lists the keys"
            raise ConfigError(f"run.accept_changes={name}: no such key or section; {hint}")


def _with_arch(recipe: Recipe) -> Recipe:
    """The recipe with the architecture of its size, which one that was built by hand may leave out."""
    if recipe.model.arch or recipe.model.init != "random" or not (recipe.size and recipe.model.family):
        return recipe
    get_family(recipe.model.family)  # a misspelt family is named as such
    arch = (read_size(recipe.model.family, recipe.size).tree.get("model") or {}).get("arch")
    return recipe.replace({"model.arch": arch or {}})


def check_layout(recipe: Recipe, world_size: int) -> None:
    """ConfigError where the parallel sizes don't go with the ranks, the architecture or the batch."""
    _check_ranks(recipe, world_size)
    _check_arch(recipe)
    _check_batch(recipe, world_size)


def text_config(arch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a Hugging Face config: where it lies differs between families."""
    thinker = arch.get("thinker_config")
    if isinstance(thinker, Mapping):
        arch = thinker
    text = arch.get("text_config")
    return text if isinstance(text, Mapping) else arch


def num_experts(arch: Mapping[str, Any]) -> int:
    """Experts of a mixture-of-experts layer; 0 for a dense model, also where its config has such a key.

    transformers has a model type of its own for each decoder with experts, "moe" in its name, and passes over the key
    in the config of a dense one.
    """
    text = text_config(arch)
    kind = text.get("model_type") or arch.get("model_type") or "moe"
    if "moe" not in str(kind):
        return 0
    return (
        text.get("num_experts") or text.get("num_local_experts") or 0
    )  # the second as transformers saves some


def data_parallel(recipe: Recipe, world_size: int) -> int:
    """Replicas of the model that see different samples."""
    parallel = recipe.parallel
    return world_size // (parallel.tp * parallel.pp * parallel.cp)


def run_folder(recipe: Recipe) -> str:
    """`run.dir`, or the folder a run gets by default: runs/<recipe>-<size>."""
    if recipe.run.dir is not None:
        return recipe.run.dir
    size = f"-{Path(recipe.size).stem}" if recipe.size else ""
    return f"runs/{Path(recipe.recipe).stem}{size}"


def alignment(recipe: Recipe) -> int:
    """Tokens a packed sample's length has to be a multiple of.

    Each is cut in 2*cp chunks, and with sequence parallel a rank's part of the row, 1/cp of it, in tp shares. Products
    in FP8 want multiples of 16 tokens on a rank.
    """
    parallel = recipe.parallel
    shares = parallel.tp if _sequence_parallel(recipe) else 1
    shares = lcm(shares, 16) if recipe.engine.fp8 else shares
    return parallel.cp * lcm(2, shares) if parallel.cp > 1 else shares


def _sequence_parallel(recipe: Recipe) -> bool:
    """`parallel.sp`, or what it is by default."""
    parallel = recipe.parallel
    return parallel.sp if parallel.sp is not None else parallel.tp > 1 and num_experts(recipe.model.arch) > 0


def _derived(recipe: Recipe) -> dict[str, Any]:
    """Values of the keys left open that follow from other keys or from the machine."""
    sp = _sequence_parallel(recipe)
    changes: dict[str, Any] = {"run.dir": str(expanded(run_folder(recipe))), "parallel.sp": sp}
    if recipe.packing.align is None:
        changes["packing.align"] = alignment(recipe)
    if recipe.engine.precision is None:
        changes["engine.precision"] = "bf16" if gpu_count() else "fp32"
    return changes


def _check_values(recipe: Recipe) -> None:
    for name in recipe.parallel.plan:
        if name not in PLANNED:
            near = ", ".join(nearest(name, list(PLANNED)))
            raise ConfigError(f"parallel.plan={name}: nothing of that name is planned; nearest: {near}")
    if recipe.train.min_lr > recipe.train.lr:
        raise ConfigError(
            f"train.min_lr={recipe.train.min_lr:g} is above train.lr={recipe.train.lr:g}: the rate falls from train.lr to "
            f"train.min_lr; give a lower train.min_lr, 0 say"
        )
    if not recipe.data.train:
        raise ConfigError("data.train=[]: nothing to train on; name a JSONL file or a bundled set")
    _check_bundled(recipe)
    check_entries(recipe.data.train, recipe.data.eval)


def _check_bundled(recipe: Recipe) -> None:
    """Defaults for the bundled set are within the bounds of the keys that they stand for."""
    known = ("augment", "augment_variants", "blank_answers")
    for name, value in recipe.data.bundled.items():
        if name not in known:
            near = ", ".join(nearest(name, list(known)))
            raise ConfigError(f"data.bundled.{name}: no such key; nearest: {near}")
        key = keys(Recipe)[f"data.{name}"]
        whole = name != "augment_variants" or float(value).is_integer()
        if key.bounds is not None and not (key.bounds.hold(value) and whole):
            raise ConfigError(f"data.bundled.{name}={value:g}: wanted {key.wanted}")


def _check_model(recipe: Recipe) -> None:
    if not recipe.model.family:
        raise ConfigError("model.family is not set; `zoo list` shows the families")
    family = get_family(recipe.model.family)
    for part in recipe.model.freeze:
        if part not in family.parts:
            near = ", ".join(nearest(part, list(family.parts)))
            raise ConfigError(f"model.freeze={part}: {family.name} has no such part; nearest: {near}")
    for part, scale in recipe.train.lr_scale.items():
        if part not in family.parts:
            near = ", ".join(nearest(part, list(family.parts)))
            raise ConfigError(f"train.lr_scale.{part}: {family.name} has no such part; nearest: {near}")
        if part in recipe.model.freeze:
            raise ConfigError(
                f"train.lr_scale.{part}: model.freeze has {part} too; take it out of one of the two"
            )
        if not scale > 0:
            raise ConfigError(
                f"train.lr_scale.{part}={scale:g}: wanted a number above 0; model.freeze stops a part"
            )
    if set(family.parts) <= set(recipe.model.freeze):
        raise ConfigError(
            f"model.freeze={','.join(family.parts)}: nothing would be left to train; leave a part out"
        )
    init = recipe.model.init
    if init != "random" and not is_hub_id(init) and not expanded(init).exists():
        raise ConfigError(
            f"model.init={init}: no such folder; wanted random, a checkpoint folder or a hub id"
        )
    if init == "random" and not recipe.model.arch:
        raise ConfigError("model.arch is empty and model.init=random: give size=, or model.init=<folder>")


def _check_lora(recipe: Recipe) -> None:
    lora, family = recipe.lora, get_family(recipe.model.family)
    if not lora.rank:
        if lora.init is not None:
            raise ConfigError(f"lora.init={lora.init} with lora.rank=0: no adapter is trained; set lora.rank")
        return
    for key, values in (("lora.targets", lora.targets), ("lora.parts", lora.parts)):
        if not values:
            raise ConfigError(f"{key}=[]: no linear would have an adapter; leave {key} out for its default")
    for part in lora.parts:
        if part not in family.parts:
            near = ", ".join(nearest(part, list(family.parts)))
            raise ConfigError(f"lora.parts={part}: {family.name} has no such part; nearest: {near}")
        if part in recipe.model.freeze:
            raise ConfigError(
                f"lora.parts={part}: model.freeze has {part} too; take it out of one of the two"
            )
    for part in recipe.train.lr_scale:
        if part not in lora.parts:
            raise ConfigError(
                f"train.lr_scale.{part}: lora.parts is without {part}, which is not trained then"
            )
    if lora.init is not None and not (expanded(lora.init) / "adapter_config.json").is_file():
        raise ConfigError(f"lora.init={lora.init}: no adapter_config.json there; wanted an adapter's folder")


def _check_length(recipe: Recipe) -> None:
    steps, epochs = recipe.train.steps, recipe.train.epochs
    if steps is None and epochs is None:
        raise ConfigError(
            "train.steps and train.epochs are both null: give one of them, such as train.epochs=1"
        )
    if steps is not None and epochs is not None:
        raise ConfigError(
            f"train.steps={steps} and train.epochs={epochs:g} are both given: set one of them to null"
        )


def _check_ranks(recipe: Recipe, world_size: int) -> None:
    parallel = recipe.parallel
    fitting = f"{_ranks(world_size)} of the run; {_listed(_divisors(world_size))} would"
    dense = parallel.tp * parallel.pp * parallel.cp
    if world_size % dense:
        raise ConfigError(
            f"parallel.tp={parallel.tp} * pp={parallel.pp} * cp={parallel.cp} = {dense} does not divide the "
            f"{fitting}, or nproc={_next_multiple(world_size, dense)}"
        )
    expert = parallel.etp * parallel.ep * parallel.pp
    if world_size % expert:
        raise ConfigError(
            f"parallel.etp={parallel.etp} * ep={parallel.ep} * pp={parallel.pp} = {expert} does not divide the "
            f"{fitting}, or nproc={_next_multiple(world_size, expert)}"
        )
    if parallel.sp and parallel.tp == 1:
        raise ConfigError(
            "parallel.sp=true with parallel.tp=1: sequence parallel shares the tokens out over tensor-parallel "
            "ranks; give parallel.tp=2 or more, or leave parallel.sp open"
        )
    if parallel.vpp > 1 and parallel.pp == 1:
        raise ConfigError(
            f"parallel.vpp={parallel.vpp} needs pipeline stages: give parallel.pp=2 or more, or vpp=1"
        )


def _check_arch(recipe: Recipe) -> None:
    """Parallel sizes against the architecture; what the config leaves to its defaults is not checked here."""
    parallel, text = recipe.parallel, text_config(recipe.model.arch)
    if recipe.model.arch:
        _check_experts(recipe, num_experts(recipe.model.arch))
    heads, layers = text.get("num_attention_heads"), text.get("num_hidden_layers")
    if heads:
        groups = text.get("num_key_value_heads") or heads
        fitting = [tp for tp in _divisors(heads) if groups % tp == 0 or tp % groups == 0]
        if parallel.tp not in fitting:
            raise ConfigError(
                f"parallel.tp={parallel.tp} does not divide the {heads} attention heads and {groups} key-value "
                f"heads of the model; {_listed(fitting)} would"
            )
    for key in ("vocab_size",) if _all_sparse(recipe, text) else ("vocab_size", "intermediate_size"):
        size = text.get(key)
        if size and size % parallel.tp:
            raise ConfigError(
                f"parallel.tp={parallel.tp} does not divide the model's {key} {size}; {_listed(_divisors(size))} would"
            )
    if "linear_attention" in (text.get("layer_types") or ()):
        _check_linear_attention(recipe, text)
    if layers and layers % (parallel.pp * parallel.vpp):
        raise ConfigError(
            f"parallel.pp={parallel.pp} * vpp={parallel.vpp} does not divide the {layers} layers of the model; "
            f"a product of {_listed(_divisors(layers))} would"
        )


def _all_sparse(recipe: Recipe, text: Mapping[str, Any]) -> bool:
    """Whether every layer has experts, so that `intermediate_size` is nobody's."""
    some = bool(num_experts(recipe.model.arch))
    return some and not text.get("mlp_only_layers") and text.get("decoder_sparse_step", 1) == 1


def _check_linear_attention(recipe: Recipe, text: Mapping[str, Any]) -> None:
    """Gated DeltaNet gives every tensor and context parallel rank heads of its own."""
    parallel = recipe.parallel
    for key in ("linear_num_key_heads", "linear_num_value_heads"):
        heads = text.get(key)
        if heads and heads % (parallel.tp * parallel.cp):
            raise ConfigError(
                f"parallel.tp={parallel.tp} * cp={parallel.cp} = {parallel.tp * parallel.cp} does not divide the "
                f"model's {key} {heads}: every rank needs linear attention heads of its own; a product of "
                f"{_listed(_divisors(heads))} would"
            )


def _check_experts(recipe: Recipe, experts: int) -> None:
    parallel = recipe.parallel
    if not experts and (parallel.ep > 1 or parallel.etp > 1):
        raise ConfigError(
            f"parallel.ep={parallel.ep}, etp={parallel.etp}: the model has no experts; set both to 1"
        )
    if experts and experts % parallel.ep:
        raise ConfigError(
            f"parallel.ep={parallel.ep} does not divide the {experts} experts of the model; "
            f"{_listed(_divisors(experts))} would"
        )
    width = text_config(recipe.model.arch).get("moe_intermediate_size")
    if experts and width and width % parallel.etp:
        raise ConfigError(
            f"parallel.etp={parallel.etp} does not divide the experts' width {width}; "
            f"{_listed(_divisors(width))} would"
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
    replicas = data_parallel(recipe, world_size)
    unit = replicas * train.micro_batch
    if train.global_batch % unit:
        raise ConfigError(
            f"train.global_batch={train.global_batch} is no multiple of {unit} = {replicas} data-parallel "
            f"replicas * train.micro_batch={train.micro_batch}; {_around(train.global_batch, unit)} would work"
        )
    micro_batches, stages = train.global_batch // unit, recipe.parallel.pp
    if recipe.parallel.vpp > 1 and micro_batches % stages:
        raise ConfigError(
            f"train.global_batch={train.global_batch} makes {micro_batches} micro-batches, no multiple of "
            f"parallel.pp={stages}, which parallel.vpp={recipe.parallel.vpp} needs; "
            f"{_around(train.global_batch, unit * stages)} would work"
        )


def _check_packing(recipe: Recipe) -> None:
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


def _check_engine(recipe: Recipe) -> None:
    if recipe.engine.fp8:
        _check_fp8(recipe)
    if recipe.engine.backend != "te":
        return
    if not gpu_count():
        raise ConfigError(
            "engine.backend=te: Transformer Engine needs a GPU and none is here; use engine.backend=torch"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            "engine.backend=te: Transformer Engine is not installed; "
            "pip install --no-build-isolation 'zoo-train[te]', or use engine.backend=torch"
        )
    if recipe.engine.precision == "fp32":
        raise ConfigError(TE_IN_FP32)


def _check_fp8(recipe: Recipe) -> None:
    engine = recipe.engine
    if engine.precision != "bf16":
        raise ConfigError(
            f"engine.fp8=true with engine.precision={engine.precision}: what is not in FP8 is in bf16; "
            f"set engine.precision=bf16"
        )
    if engine.backend == "torch" or importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            f"engine.fp8=true with engine.backend={engine.backend}: FP8 is Transformer Engine's; install it and set "
            f"engine.backend=te, or leave engine.fp8 out"
        )
    _check_fp8_widths(recipe)


def _check_fp8_widths(recipe: Recipe) -> None:
    """FP8 products want 16 inputs and outputs at a time, on every rank; experts are in bf16."""
    tp, text = recipe.parallel.tp, text_config(recipe.model.arch)
    for key, (width, ranks) in _fp8_widths(recipe, text).items():
        if width and width % (16 * ranks):
            raise ConfigError(
                f"engine.fp8=true with parallel.tp={tp}: the model's {key} is {width}, and FP8 wants a multiple of "
                f"{16 * ranks}; leave engine.fp8 out"
            )


def _fp8_widths(recipe: Recipe, text: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(width, ranks that it is cut over) of what the decoder's linears take and give; 0 where the config leaves it open."""

    def of(key: str) -> int:
        return int(text.get(key) or 0)

    tp, heads = recipe.parallel.tp, of("num_attention_heads")
    groups = of("num_key_value_heads") or heads
    head = of("head_dim") or (of("hidden_size") // heads if heads else 0)
    found = {"hidden_size": (of("hidden_size"), 1)}
    if not _all_sparse(recipe, text):
        found["intermediate_size"] = (of("intermediate_size"), tp)
    found["shared_expert_intermediate_size"] = (of("shared_expert_intermediate_size"), tp)
    found["num_attention_heads * head_dim"] = (heads * head, tp)
    found["(num_attention_heads + 2 * num_key_value_heads) * head_dim"] = ((heads + 2 * groups) * head, tp)
    if "linear_attention" in (text.get("layer_types") or ()):
        keys = of("linear_num_key_heads") * of("linear_key_head_dim")
        values = of("linear_num_value_heads") * of("linear_value_head_dim")
        found["linear_num_value_heads * linear_value_head_dim"] = (values, tp)
        found["linear attention's projection"] = (2 * (keys + values + of("linear_num_value_heads")), tp)
    return found


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _next_multiple(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _around(number: int, unit: int) -> str:
    """The multiples of `unit` next to `number`, in words."""
    above = _next_multiple(number, unit)
    return f"{above - unit} or {above}" if above > unit else f"{above}"


def _listed(numbers: list[int]) -> str:
    """Numbers in words; the middle of a long list is left out."""
    shown = [str(number) for number in numbers]
    if len(shown) > 10:
        shown = [*shown[:6], "...", *shown[-2:]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
