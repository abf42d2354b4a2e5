"""The model, the method, adapters and frozen parts of another trainer's settings."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from zoo.config.files import read_part, read_size, size_names
from zoo.config.foreign.reader import Reader, leaf, number
from zoo.config.layers.foreign import foreign_name
from zoo.config.locate import look, read_arch
from zoo.config.recipes.matrix import LORA, SFT, RecipeParts, names_in
from zoo.config.recipes.published import published_size
from zoo.errors import UserError
from zoo.registry import ModelFamily, families

_KINDS = (
    "finetuning_type", "train_type", "tuner_type", "sft_type", "adapter", "peft_type", "use_peft", "use_lora", "full_finetuning",
)  # fmt: skip
_QUANTISED = ("load_in_4bit", "load_in_8bit", "quantization_bit", "quant_bits", "quant_method", "quantization_method")
_WHOLE = ("", "full", "none", "false")
# What trainers do where nothing is said: adapters, their rank and alpha, frozen towers.
_WITH_ADAPTERS = ("LLaMA-Factory", "ms-swift")
_WIDTHS: dict[str, tuple[int, int | None]] = {"LLaMA-Factory": (8, None), "ms-swift": (8, 32), "TRL": (16, 32)}
_FREEZING = ("LLaMA-Factory", "ms-swift")
_LEARNT_BY_TRIAL = ("ppo", "grpo", "gae", "rloo", "reinforce", "gspo", "dapo", "remax", "gkd")
_SAME_LINEARS = {"output_proj": "o_proj"}  # torchtune's name


def read_model(reader: Reader) -> None:
    """The model, the method, and the recipe that has both."""
    components = [key for key in reader.left if leaf(key) in ("_component_", "_target_")]
    architecture = str(reader.left.get("model._component_", ""))
    for key in components:
        if not key.startswith(("dataset", "optimizer", "lr_scheduler")):
            reader.left.pop(key)
    init = reader.take_for("model.init")
    named = (init, _template(reader), reader.take_for("model.family"), architecture)
    names = [str(name) for name in named if name]
    kind = reader.take(*_KINDS)
    method = str(kind if kind is not None else "").lower()
    adapters = _has_adapters(reader, kind, method, architecture)
    if method not in (*_WHOLE, "true") and "lora" not in method:
        reader.decide(
            "finetuning_type",
            f"{method}: lora.rank=N trains adapters, model.freeze=[PART] leaves parts as they are; all weights are trained else",
        )
    if any([method == "qlora", *(reader.take(name) for name in _QUANTISED)]):
        text = "they are not trained here; adapters stand on bf16 weights, on 8 bits or on 4: lora.base_dtype=fp8, nf4"
        reader.decide("quantised weights", text)
    if init is not None:
        reader.set("model.init", init)
    model = model_of(names)
    _choose_recipe(reader, model, names, adapters)
    _adapters(reader, adapters)
    _parts(reader, model, adapters)


def _template(reader: Reader) -> str | None:
    """A chat template's name, which may be a family's; a file of one is set."""
    template = reader.take("template", "chat_template", "chat_template_path", "conversation_template")
    if isinstance(template, str) and template.endswith((".jinja", ".jinja2", ".json")):
        reader.set("data.template", template)
        return None
    if template is not None:
        reader.translation.done.append("template")
    return template if isinstance(template, str) and "{" not in template else None


def _has_adapters(reader: Reader, kind: object, method: str, architecture: str) -> bool:
    if "lora" in method or "lora" in architecture or kind is True or method == "true":
        return True
    named = ("lora_rank", "lora_r", "lora_alpha", "adapter_name_or_path", "lora_target")
    if kind is None and any(foreign_name(key) in named for key in reader.left):
        return True
    megatron = any("model_parallel_size" in key for key in reader.left)
    return kind is None and reader.program in _WITH_ADAPTERS and not megatron


def _choose_recipe(reader: Reader, model: Model | None, names: list[str], adapters: bool) -> None:
    trial = str(reader.take("adv_estimator") or "").lower()
    stage = str(reader.take("stage", "rlhf_type", "rl", "task_type") or trial or "sft").lower()
    task, loss = _METHODS.get(stage, (None, None))
    if stage not in _METHODS:
        more = " (verl learns so with zoo as its engine: docs/verl.md)" if stage in _LEARNT_BY_TRIAL else ""
        reader.decide("stage", f"{stage}: no recipe does this{more}; the command fine-tunes on the rows' answers")
    if reader.recipe is not None:
        if task is not None:
            reader.decide("stage", f"{stage}: task={task} beside the recipe's name")
    elif model is None:
        shown = ", ".join(names) or "no model is named"
        reader.decide("RECIPE", f"{shown}: no family of zoo is called so; `zoo list families` shows what there is")
    else:
        fitting = recipe_of(model, task, adapters)
        if fitting is None:
            said = f"no recipe of {model.family.name} does this; the command fine-tunes on the rows' answers"
            reader.decide("stage", f"{stage}: {said}")
        elif loss is not None:
            reader.set("train.loss", loss)
        reader.translation.recipe = fitting or reader.translation.recipe


def _adapters(reader: Reader, adapters: bool) -> None:
    targets = reader.take(
        "lora_target", "target_modules", "lora_target_modules", "lora_target_linear", "lora_attn_modules"
    )
    rank, alpha = reader.take("lora_rank", "lora_r", "lora_dim", "peft_r"), reader.take("lora_alpha")
    rslora, ratio = reader.take("use_rslora", "peft_use_rslora"), reader.take("loraplus_lr_ratio", "lorap_lr_ratio")
    dora = reader.take("use_dora", "peft_use_dora", "lora_use_dora")
    if not adapters:
        return
    if rslora:
        reader.set("lora.rslora", True)
    if dora:
        reader.set("lora.dora", True)
    if ratio is not None:
        reader.set("lora.b_lr_scale", ratio)
    usual_rank, usual_alpha = _WIDTHS.get(reader.program, (None, None))
    rank = usual_rank if rank is None else rank
    if rank is not None:
        reader.set("lora.rank", rank)
    elif reader.recipe is not None:
        reader.decide("lora.rank", "the width of the adapters")
    if alpha is None and reader.program == "LLaMA-Factory" and isinstance(rank, int):
        alpha = 2 * rank
    alpha = usual_alpha if alpha is None else alpha
    if alpha is not None:
        reader.set("lora.alpha", alpha)
    pattern = isinstance(targets, str) and any(mark in targets for mark in "()[\\*^$")
    named = targets.split(",") if isinstance(targets, str) and not pattern else [targets] if pattern else targets
    if isinstance(named, list) and not {"all", "all-linear", "all_linear"} & set(map(str, named)):
        reader.set("lora.targets", [_SAME_LINEARS.get(str(name).strip(), str(name).strip()) for name in named])
    elif targets is not None:
        reader.translation.done.append("lora_target")


def _parts(reader: Reader, model: Model | None, adapters: bool) -> None:
    """Parts that stay as they are, and the rates of others."""
    tower = reader.take("freeze_vision_tower", "freeze_vit", "freeze_vision")
    aligner = reader.take("freeze_multi_modal_projector", "freeze_aligner", "freeze_mm_mlp_adapter", "freeze_projector")
    language = reader.take("freeze_language_model", "freeze_llm", "freeze_text_model")
    if model is None:
        parts = [name for name, value in (("towers", tower), ("projector", aligner), ("language", language)) if value]
        if parts:
            reader.decide("model.freeze", f"the family's parts for: {', '.join(parts)}")
        return
    usual = reader.program in _FREEZING
    parts = [part for part in model.family.all_parts if part != "talker"]  # which these programs do not train
    aligners = [part for part in parts if "projector" in part or "merger" in part]
    towers = [part for part in model.family.parts if part not in ("language", "talker", *aligners)]
    inner = set(aligners) & set(model.family.inner)
    frozen_towers, frozen_aligners = (usual if value is None else bool(value) for value in (tower, aligner))
    kept = [
        *(towers if frozen_towers else []),
        *(aligners if frozen_aligners else []),
        *(["language"] if language else []),
    ]
    trained = [part for part in parts if part not in kept]
    if adapters:
        trained = ["language"] if tower in (None, True) and aligner in (None, True) and not language else trained
        if trained != ["language"]:
            reader.set("lora.parts", trained)
    else:
        named = [part for part in kept if not (part in inner and frozen_towers)]  # a frozen tower includes it
        if frozen_towers and not frozen_aligners:
            for part in sorted(inner):
                reader.set(f"train.lr_scale.{part}", 1.0)
        if named:
            reader.set("model.freeze", named)
    of_towers = dict.fromkeys(("vit_lr", "vision_lr", "vision_tower_lr", "mm_vision_tower_lr"), towers)
    _rates(reader, {**of_towers, "aligner_lr": aligners, "mm_projector_lr": aligners}, trained)


def _rates(reader: Reader, parts: dict[str, list[str]], trained: list[str]) -> None:
    """Read the learning rates of parts, as factors of the run's."""
    whole = number(reader.translation.settings.get("train.lr"))
    for name, ones in parts.items():
        if not any(leaf(key) == name for key in reader.left):
            continue
        rate = number(reader.take(name))
        ones = [part for part in ones if part in trained]
        if rate is None or not whole or not ones:
            reader.decide(name, "train.lr_scale.PART, its rate / train.lr, for a part that is trained")
            continue
        for part in ones:
            reader.translation.settings[f"train.lr_scale.{part}"] = float(f"{rate / whole:.6g}")


_EXPERTS = re.compile(r"a\d+b|moe", re.IGNORECASE)  # in names of models that have them


class Model(NamedTuple):
    """A family, and the size that is meant; None where none that comes with zoo is."""

    family: ModelFamily
    size: str | None
    experts: bool  # whether its name says that it has experts


# What is learnt: a task of recipes, None for supervised fine-tuning, and a loss other than the task's.
_METHODS: dict[str, tuple[str | None, str | None]] = {
    **dict.fromkeys(("sft", "pt", "pretrain", "causal_lm"), (None, None)),
    **{"dpo": ("dpo", None), "rm": ("reward", None), "reward": ("reward", None)},
    **{name: ("dpo", name) for name in ("kto", "orpo", "simpo", "ipo")},
}


def model_of(names: list[str]) -> Model | None:
    """The model that hub ids, folders or templates name; None where no family's title is in them."""
    for name in names:
        if (published := published_size(name)) is not None:
            return Model(families()[published[0]], published[1], bool(_EXPERTS.search(published[1])))
    for name in names:
        if (kind := _model_type(name)) is not None:
            for name_of_recipes, family_name, size in _published():
                if read_size(family_name, size).tree.get("model", {}).get("arch", {}).get("model_type") == kind:
                    return Model(families()[family_name], size, "moe" in name_of_recipes)
    plain = [(_plain(title), family) for family in families().values() for title in (family.title, family.name)]
    for name in names:
        last = _plain(name.rstrip("/").rpartition("/")[2])
        within = [(title, family) for title, family in plain if title in last]
        if within:
            family = max(within, key=lambda match: len(match[0]))[1]
            sizes = [size for size in size_names(family.name) if last.endswith(_plain(size)) and "tiny" not in size]
            return Model(family, sizes[-1] if sizes else None, bool(_EXPERTS.search(name)))
    return None


def recipe_of(model: Model, task: str | None, adapters: bool) -> str | None:
    """The recipe that comes with zoo for a family and method; None where there is none."""
    fitting = {name: size for name, family, size in _published() if family == model.family.name}
    same = [name for name, size in fitting.items() if size == model.size]
    kind = [name for name, size in fitting.items() if bool(_EXPERTS.search(size)) == model.experts]
    name = next(iter(same or kind or fitting), None)
    return None if name is None else RecipeParts(name, task or SFT, LORA if adapters else None).name


def size_of(init: str) -> str | None:
    """The size that was published under a hub id."""
    published = published_size(init)
    return None if published is None else published[1]


@cache
def _published() -> list[tuple[str, str, str]]:
    """Each family of recipes, the family of its model, and its published size."""
    trees = {name: read_part("families", name).tree for name in names_in("families")}
    return [(name, tree["model"]["family"], str(tree.get("published_size"))) for name, tree in trees.items()]


def _model_type(name: str) -> str | None:
    """The model_type of a folder's config.json."""
    try:
        source = look(name)
        return None if source is None else read_arch(source.files).get("model_type")
    except UserError:
        return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.partition("(")[0].lower())
