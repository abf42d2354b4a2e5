"""The model card (README.md) of an exported folder: what it is made of, and how it is loaded."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import zoo
from zoo.bridge.export_plan import OF_TOKENS
from zoo.bridge.files.side_files import MARK, licence_of
from zoo.bridge.native import read_about
from zoo.checkpoint import loading
from zoo.config.entries import parse_entry
from zoo.config.locate import ABOUT, Place
from zoo.config.schema import Recipe, TrainConfig
from zoo.errors import printable
from zoo.files import expanded
from zoo.pages import Markdown, code, render_markdown
from zoo.types import JsonMapping

_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")  # the hub's cache, of huggingface_hub
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_CLASSIFIER = "ForSequenceClassification"
_CLASS = re.compile(r"[A-Za-z_]\w{0,99}")
_LONGEST = 300  # letters of a value that a card shows
NO_ENDS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Base:
    """What weights come from: its name, whether that is an id of the hub, and what it says of its licence."""

    name: str
    on_hub: bool
    licence: Mapping[str, str]


def base_of(source: Place | None) -> Base | None:
    """The model that weights come from in the end, through runs and conversions; None for random weights."""
    while source is not None and source.kind == "run":
        source = loading.started_from(source)
    if source is None:
        return None
    name = source.folder.absolute().name
    if source.kind == "zoo" and (source.folder / ABOUT).is_file():
        name = str(read_about(source.folder).get("source") or name)
    cached = [match for part in source.folder.absolute().parts if (match := _CACHED.fullmatch(part))]
    if cached:
        name = f"{cached[-1][1]}/{cached[-1][2]}"
    on_hub = bool(cached) or (source.kind == "zoo" and _HUB_ID.fullmatch(name) is not None)
    return Base(name, on_hub, licence_of(source.files))


def name_of(source: Place, path: str) -> str:
    """What a conversion writes down of its source: a hub id, or the folder's name without the path to it."""
    base = base_of(source)
    return base.name if base is not None and base.on_hub else expanded(path).absolute().name


def trained(
    recipe: Recipe | None, steps: int, source: Place | None, arch: JsonMapping,
    *, adapter: bool = False, ends: Mapping[str, int] = NO_ENDS, servers: str = "", quantised: str = "",
) -> str:  # fmt: skip
    """The card of what a run exports; `source` is what the run started from, `arch` the export's config.json.

    `ends` are the tokens that training taught as ends of answers, text -> id; `servers`: how adapters are served, where not as they are;
    `quantised`: how the weights are.
    """
    rows = {"steps": str(steps), **({} if recipe is None else _of_recipe(recipe))}
    if recipe is not None and recipe.lora.rank:
        lora = recipe.lora
        rows["adapters"] = f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}"
        rows["adapters"] += "" if adapter else "; merged into the weights"
        rows["trained whole"] = ", ".join(lora.whole_parts)
        rows["trained whole"] += " (PEFT's modules_to_save)" if adapter and lora.whole_parts else ""
        rows["to serve it"] = servers
    if ends and not (recipe is not None and recipe.train.scores):
        rows["answers end at"] = ", ".join(f"{text} ({number})" for text, number in ends.items())
    rows["quantised"] = quantised
    summary = "adapters that were trained" if adapter else "a model that was trained"
    if recipe is not None and recipe.train.scores:
        arch = {**arch, "architectures": [OF_TOKENS.sub(_CLASSIFIER, str(_class(arch)))]}
    return _card(f"This folder holds {summary} with zoo.", rows, base_of(source), arch, adapter=adapter, ends=ends)


def _of_recipe(recipe: Recipe) -> dict[str, str]:
    train, pack = recipe.train, recipe.packing
    names = [Path(str(parse_entry(spec, "data.train"))).name for spec in recipe.data.train]
    return {
        "rows in a step": str(train.global_batch),
        "recipe": Path(recipe.recipe).name + (f", size {recipe.size}" if recipe.size else ""),
        "data": ", ".join(names),
        "learning rate": f"{train.lr:g}, {train.warmup_steps} steps of warm-up, {_schedule(train)}",
        "packing": f"{pack.mode}, {pack.budget} tokens",
        "precision": recipe.engine.precision or "",
        "not trained": ", ".join(recipe.model.freeze),
    }


def _schedule(train: TrainConfig) -> str:
    """What follows the warm-up."""
    if train.schedule == "constant":
        return "constant"
    if train.schedule == "wsd":
        last = "tenth" if train.decay_steps is None else f"{train.decay_steps} steps"
        return f"stable, linear to {train.min_lr:g} in the last {last}"
    return f"{train.schedule} to {train.min_lr:g}"


def untrained(source: Place | None, arch: JsonMapping) -> str:
    """The card of what a run's adapters belong to."""
    summary = "This folder holds the weights that the adapters of a run of zoo belong to."
    return _card(summary, {}, base_of(source), arch)


def converted(source: Place, arch: JsonMapping, how: Mapping[str, str], *, native: bool = False) -> str:
    """The card of a folder that holds the weights of another in another form; `how`: what was changed."""
    summary: str = "This folder holds weights that zoo has written in another format."
    if native:
        command = code("zoo train model.init=<this folder>")
        summary = Markdown(f"This folder holds weights in zoo's own format: {command} starts from them.")
    return _card(summary, how, base_of(source), arch, native=native)


def _card(
    summary: str, rows: Mapping[str, str], base: Base | None, arch: JsonMapping,
    *, adapter: bool = False, native: bool = False, ends: Mapping[str, int] = NO_ENDS,
) -> str:  # fmt: skip
    licence = dict(base.licence) if base else {}
    not_known = "not known; that of the base model and of the data hold" if base else "not stated"
    about = {
        "library_name": None if native else "peft" if adapter else "transformers",
        "base_model": base.name if base and base.on_hub else None,
        **licence,
        "tags": ["zoo"],
    }
    table = {
        "base model": base.name if base else "none: training began from random weights",
        "architecture": _class(arch) or "not known",
        **rows,
        "licence": licence.get("license_name") or licence.get("license") or not_known,
        "written by": f"zoo {zoo.__version__}",
    }
    return render_markdown(
        "zoo.checkpoint",
        "model_card.md.jinja",
        about={key: value for key, value in about.items() if value},
        mark=Markdown(MARK),
        title=f"Model {'adapters for' if adapter else 'from'} {printable(base.name, _LONGEST)}" if base else "Model",
        summary=summary,
        rows={key: printable(value, _LONGEST) for key, value in table.items()},
        usage=[] if native else _usage(arch, adapter, list(ends.values())),
    )


def _class(arch: JsonMapping) -> str | None:
    names = arch.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and _CLASS.fullmatch(name) else None


def _usage(arch: JsonMapping, adapter: bool, ends: Sequence[int]) -> list[str]:
    """Lines that load the folder; none where transformers has no class for it."""
    import transformers

    name = _class(arch) or "AutoModelForImageTextToText"
    scores = name.endswith(_CLASSIFIER)
    lines = _classifier(arch, name) if scores else [f"from transformers import AutoProcessor, {name}", ""]
    if not lines:
        return []
    if adapter:
        labels = ", num_labels=1" if scores else ""
        lines[:1] = ["from peft import PeftModel", lines[0]]
        lines += [
            f'model = {name}.from_pretrained("<the base model>", dtype="auto"{labels})',
            'model = PeftModel.from_pretrained(model, "<this folder>")',
        ]
    else:
        lines += [f'model = {name}.from_pretrained("<this folder>", dtype="auto")']
    lines += ['processor = AutoProcessor.from_pretrained("<this folder>")', "# inputs = processor(...)"]
    if scores:
        return [*lines, "# model(**inputs).logits  # one number, of the last token"]
    stop = list(ends) or "processor.tokenizer.eos_token_id"
    # One that speaks takes ends for each of its parts, and reads none in generation_config.json.
    generate = getattr(getattr(transformers, name, None), "generate", None)
    parameters = inspect.signature(generate).parameters if generate else ()
    has_own_ends = any(key.endswith("_eos_token_id") for key in parameters)
    key = "thinker_eos_token_id" if has_own_ends else "eos_token_id"
    stop_argument = (
        f", {key}={stop}" if has_own_ends or (adapter and ends) else ""
    )  # else generation_config.json says it
    return [*lines, f"# model.generate(**inputs, max_new_tokens=100{stop_argument})"]


def _classifier(arch: JsonMapping, name: str) -> list[str]:
    """Lines that import a reward model's class, or make it of transformers' generic one; none where it has no such model."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    if hasattr(transformers, name):
        return [f"from transformers import AutoProcessor, {name}", ""]
    if arch.get("model_type") not in MODEL_MAPPING_NAMES:
        return []
    base = name.replace(_CLASSIFIER, "PreTrainedModel")
    imports = (
        f"from transformers import AutoProcessor, {base}\nfrom transformers.modeling_layers import Generic{_CLASSIFIER}"
    )
    return f"{imports}\n\n\nclass {name}(Generic{_CLASSIFIER}, {base}):\n    pass\n\n\n".split("\n")[:-1]
