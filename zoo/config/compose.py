"""From a recipe's name and overrides to one resolved recipe.

What is said later wins::

    schema defaults < recipe < size overlay < hardware overlay < the run of model.init < the user's own file < overrides

The user's own file is a YAML that names a `base:` recipe: it is overrides kept in a file, so an overlay does not
undo what it says. A file without `base:` is itself the recipe. A hardware overlay may leave keys to be planned
(`parallel.plan`); what the user's file or an override sets is not. With `model.init` a Hugging Face folder or a hub id, the
architecture is that of its config.json, and no size is chosen unless `size=` is given. Where it is a zoo run instead, and no
`size=` is given, the sizes in which that run trained are taken with its architecture (`OF_A_RUN`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from zoo.config.architecture import refuse_misplaced
from zoo.config.checks.effects import refuse_without_effect
from zoo.config.devices import gpu_count
from zoo.config.files import hardware_layers, read_recipe, read_size, root_recipes, size_names
from zoo.config.foreign.translation import refuse_foreign_file, refuse_unknown
from zoo.config.layers.keys import shown_value
from zoo.config.layers.layer import Layer, Overrides, escaped
from zoo.config.layers.tree import apply, deepest, leaves_of, schema_tree, set_key, to_values
from zoo.config.locate import Place, is_hub_id, look, read_arch, read_state
from zoo.config.recipes.chain import (
    BY_HAND,
    CHOICES,
    base_chain,
    hand_built_chain,
    is_shipped,
    refuse_file_keys,
    split_overrides,
    with_objects,
    without_file_keys,
)
from zoo.config.recipes.published import KnownArch, arch_of_hub
from zoo.config.schema import Recipe
from zoo.errors import ConfigError, UserError, printable
from zoo.files import write_atomically
from zoo.registry import get_family
from zoo.types import JsonObject

__all__ = ["ConfigError", "Resolved", "about", "load_recipe", "recipe_for_weights", "resolve", "save_recipe"]

# The keys that names of parallel.plan stand for; the others are keys of parallel.
PLANNED_KEYS = {
    "pp": ("parallel.pp", "parallel.stage_layers"),
    "recompute": ("engine.recompute",),
    "memory": ("train.exp_avg_dtype", "train.exp_avg_sq_dtype"),
    "offload": ("train.optimizer_offload_fraction", "engine.offload_activations"),
    "graphs": ("engine.cuda_graphs",),
    "batch": ("train.global_batch",),
}

# What a run that starts from another run's weights takes from its recipe: how much a step and a sample may hold.
OF_A_RUN = (
    "packing.budget", "train.global_batch", "nproc_cpu", "engine.precision", "data.template",
    "data.min_pixels", "data.max_pixels", "data.video_max_pixels", "data.video_fps", "data.max_frames",
)  # fmt: skip

_SAVED = "# A resolved recipe: every key has its value, no overlay is applied when it is loaded."


@dataclass(frozen=True)
class Resolved:
    """A recipe and how its size came about."""

    recipe: Recipe
    size_why: str  # why this size, in a few words
    base: Recipe  # the same without what the user's own file and the overrides set
    base_name: str  # its recipe and overlays, for messages
    taken: str = ""  # what was taken from the run of model.init, in a sentence; "" for nothing


def load_recipe(recipe: str | Path | Recipe, overrides: Overrides = ()) -> Recipe:
    """The recipe of that name or YAML path, or the one that a program has built, resolved.

    Args:
        recipe: a name that `zoo list` shows, a path of a YAML file (also a run's `config.yaml`), or a `zoo.Recipe`. A recipe that
            was built by hand says what a file with `base:` (its `recipe`) says: size and hardware are put under what it gives.
        overrides: ``a.b=c`` or ``--a.b=c``, values read as YAML; or a dict of keys, dotted or nested, and values.

    Raises:
        ConfigError: a name, key or value is wrong; the message says which and what was wanted.
    """
    return resolve(recipe, overrides).recipe


def resolve(recipe: str | Path | Recipe, overrides: Overrides = ()) -> Resolved:
    """:func:`load_recipe`, with the reason for the size that was taken."""
    typed, objects = split_overrides(overrides)
    refuse_file_keys(typed, allowed=CHOICES)
    if isinstance(recipe, Recipe) and recipe.composed:
        _refuse_overlays([typed], "the recipe given")
        changes = {**typed.tree, **objects, **{edit.path: edit.value for edit in typed.edits}}
        changed = recipe.replace(changes)
        refuse_without_effect(changed)
        return Resolved(changed, "as given", recipe, recipe.recipe)
    if isinstance(recipe, Recipe):
        chain, held = hand_built_chain(recipe, typed)
        objects = {key: rows for key, rows in held.items() if key not in _set_by([typed])} | objects
    elif isinstance(recipe, str | Path):
        refuse_foreign_file(str(recipe), load_recipe, typed)
        chain = base_chain(str(recipe), typed)
    else:
        raise ConfigError(
            f"recipe={shown_value(recipe)}: wanted a recipe's name, the path of a YAML file or a zoo.Recipe"
        )
    root, own = chain.root, [*chain.own, typed]
    refuse_unknown(chain.name, [layer for layer in (root, *own) if not is_shipped(layer)], load_recipe)
    layers, stamps, sized = [without_file_keys(root)], {}, True
    init = _last([root, *own], "model.init")
    if root.tree.get("resolved"):
        _refuse_overlays(own, root.origin)
        known = _last(own, "model.init") is None and is_hub_id(str(init))  # its architecture is in the file
        weights = None if known else _weights(init)
        why = f"as resolved in {root.origin}"
    else:
        weights = _weights(init)
        family, size, hardware, why = _choose_overlays([root, *own], weights)
        layers += _overlays(
            family, size, hardware, adamw=any(_last([root, *own], key) for key in ("lora.rank", "train.speech_loss"))
        )
        stamps, sized = {"recipe": chain.name, "size": size, "hardware": hardware}, size is not None
    tree = schema_tree(Recipe)
    for layer in layers:
        apply(tree, layer)
    if weights is not None:
        tree.model.arch = escaped(weights.arch or {})  # a text of somebody's config.json is no reference
    taken = _take_sizes_of_run(tree, root, own, sized)
    base = deepcopy(tree)
    for layer in own:
        changes = _last([layer], "model.arch")
        arch = OmegaConf.to_container(tree.model.arch)
        refuse_misplaced(arch, changes, layer.origin)
        _refuse_misspelt_arch(arch, changes, layer.origin)
        apply(tree, without_file_keys(layer))
    set_keys = _set_by(own).keys()
    for key in ("plan", "planned") if "parallel.plan" not in set_keys else ():  # what the user has set is not planned
        names = [
            name for name in tree.parallel[key] if set_keys.isdisjoint(PLANNED_KEYS.get(name, (f"parallel.{name}",)))
        ]
        set_key(tree, f"parallel.{key}", names)
    for key, value in stamps.items():
        set_key(tree, key, value)
        set_key(base, key, value)
    named = " ".join([chain.root_name, *(f"{k}={v}" for k, v in stamps.items() if v and k != "recipe")])
    users = own if is_shipped(root) or root.tree.get("resolved") else [root, *own]
    origins = _set_by([layer for layer in users if not is_shipped(layer)])
    composed = with_objects(to_values(tree), objects).marked(frozenset(origins), composed=True)
    refuse_without_effect(composed, origins)
    return Resolved(composed, why, to_values(base), named, taken)


def _set_by(layers: Sequence[Layer]) -> dict[str, str]:
    """The keys that some layers set, each with the file of the last one that does; "" for overrides."""
    origins: dict[str, str] = {}
    for layer in layers:
        origins |= {key: layer.origin for key in leaves_of(Recipe, without_file_keys(layer).tree)}
        origins |= {edit.key: layer.origin for edit in layer.edits}
    return origins


def about(name_or_path: str) -> JsonObject:
    """A recipe's description, family, published_size, tiny_size and base; its base's where it has none of its own."""
    chain = base_chain(name_or_path)
    layers = [chain.root, *chain.own]
    texts = {key: _last(layers, key) for key in ("description", "published_size", "tiny_size")}
    return {**texts, "family": _last(layers, "model.family"), "base": layers[-1].tree.get("base")}


def recipe_for_weights(init: str, family: str, overrides: Overrides = (), settings: Layer | None = None) -> Recipe:
    """A recipe that does no more than name weights, which lie here, and their family.

    `settings` of the run that made them hold where no override says otherwise.

    Raises:
        ConfigError: an override is wrong.
    """
    tree = schema_tree(Recipe)
    apply(tree, Layer("", {"model": {"family": family, "init": init}, "train": {"steps": 1}}))
    typed, objects = split_overrides(overrides)
    if settings is not None:
        apply(tree, settings)
    if (weights := _weights(_last([typed], "model.init") or init)) is not None:
        tree.model.arch = escaped(weights.arch or {})
    apply(tree, typed)
    return with_objects(to_values(tree), objects)


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write `recipe` as a YAML file that :func:`load_recipe` resolves to an equal recipe."""
    text = OmegaConf.to_yaml(OmegaConf.create(escaped(asdict(recipe))))
    write_atomically(Path(path), f"{_SAVED}\nresolved: true\n{text}")


def is_saved_recipe(path: str | Path) -> bool:
    """Whether :func:`save_recipe` wrote that file."""
    return Path(path).read_text(encoding="utf-8", errors="replace").startswith(_SAVED)


def _refuse_overlays(layers: Sequence[Layer], origin: str) -> None:
    for layer in layers:
        for key in ("size", "hardware") if layer.origin else ("size", "hardware", *CHOICES):
            if key in layer.tree:
                raise ConfigError(
                    f"{key}={shown_value(layer.tree[key])}: {origin} is a resolved recipe, to which no overlay, task or adapter is applied; "
                    f"name the recipe it came from instead"
                )


def _choose_overlays(layers: Sequence[Layer], weights: KnownArch | None) -> tuple[str, str | None, str | None, str]:
    """Family, size and hardware, and why that size."""
    family = str(_last(layers, "model.family") or Recipe().model.family)
    hardware, size = _last(layers, "hardware") or ("auto" if gpu_count() else None), _last(layers, "size")
    published = _last(layers, "published_size")
    if size is not None:
        why = "given"
    elif weights is not None:
        why = weights.source
    elif published is None and _last(layers, "model.arch"):
        why = "architecture given in model.arch"
    elif gpu_count():
        size, why = published, "the published size: a GPU is here"
    else:
        size = _last(layers, "tiny_size") or "tiny"
        why = "no GPU is here" + (f"; published: size={published}" if published else "")
    if size is not None and not family:
        _refuse_no_family(layers)
    size, hardware = (None if name is None else str(name) for name in (size, hardware))
    return family, size, hardware, why


def _refuse_no_family(layers: Sequence[Layer]) -> None:
    """A file that says nothing of a model: a misspelt key in it is named first."""
    for layer in layers:
        leaves_of(Recipe, without_file_keys(layer).tree, f"{layer.origin}: " if layer.origin else "")
    if layers[0].origin == BY_HAND:
        raise ConfigError(
            f"{BY_HAND}: model.family is not set; give model=zoo.ModelConfig(family=...), or recipe={root_recipes()[0]!r} (or another)"
        )
    raise ConfigError(
        f"{layers[0].origin}: model.family is not set; write `base: {root_recipes()[0]}` (or another recipe) "
        f"as its first line"
    )


def _last(layers: Sequence[Layer], key: str) -> Any:
    """The value of `key` in the last layer that has it, or None."""
    for layer in reversed(layers):
        value: object = layer.tree
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            return value
    return None


def _overlays(family: str, size: str | None, hardware: str | None, *, adamw: bool) -> list[Layer]:
    """The layers of size and hardware; for `adamw`, which adapters and talkers have, a size's optimizer is left out."""
    layers: list[Layer] = []
    if size is not None:
        if not size_names(family):
            get_family(family)  # a misspelt family is named as such
        layer = read_size(family, size)
        if adamw and "train" in layer.tree:
            kept = {k: v for k, v in layer.tree["train"].items() if k not in ("optimizer", "matrix_lr_scale")}
            layer = replace(layer, tree={**layer.tree, "train": kept})
        layers.append(layer)
    if hardware is not None:
        layers += hardware_layers(hardware)
    for layer in layers:
        refuse_file_keys(layer, allowed=("description",))
    return [without_file_keys(layer) for layer in layers]


def _weights(init: object) -> KnownArch | None:
    """The architecture of the weights that model.init names, here or on the hub; None where it names none."""
    if not isinstance(init, str):
        return None
    source = look(init)
    if source is not None and (source.files / "config.json").is_file():
        return KnownArch(read_arch(source.files, f"model.init={init}"), "architecture of model.init")
    if not is_hub_id(init):
        return None
    hub = arch_of_hub(init, "model.init")
    return hub._replace(source=f"architecture of model.init: {hub.source}")


def _take_sizes_of_run(tree: DictConfig, root: Layer, layers: Sequence[Layer], sized: bool) -> str:
    """Set `OF_A_RUN`, but for keys that the user or a `sized` recipe has set, as the run of `model.init` had them; says so."""
    init = _last(layers, "model.init") or tree.model.init
    source = look(init) if isinstance(init, str) else None
    if source is None or source.kind != "run":
        return ""
    _refuse_other_family(source, str(init), str(_last(layers, "model.family") or tree.model.family))
    config = source.folder.parent.parent / "config.yaml"
    if sized or not (config.is_file() and is_saved_recipe(config)):
        return ""
    run = read_recipe(str(config))
    set_keys = set(_set_by(layers if is_shipped(root) else [root, *layers]))
    if "batch" in tree.parallel.plan:
        set_keys.add("train.global_batch")
    if (_last([run], "machine.gpus") is None) != (tree.machine.gpus is None):
        set_keys.add("engine.precision")  # what suits a GPU suits no CPU
    taken = []
    for key in OF_A_RUN:
        section, _, name = key.rpartition(".")
        values = (run.tree.get(section) or {}) if section else run.tree
        if key in set_keys or name not in values or values[name] == OmegaConf.select(tree, key):
            continue
        set_key(tree, key, values[name], f"{run.origin}: ")
        taken.append(f"{key}={shown_value(values[name])}")
    return f"taken from the run that model.init={init} names: {', '.join(['its architecture', *taken])}"


def _refuse_other_family(run: Place, init: str, family: str) -> None:
    try:
        saved = read_state(run.folder).get("model")
    except UserError:
        return  # a damaged file, which the sums name
    theirs = saved.get("family") if isinstance(saved, dict) else None
    if family and isinstance(theirs, str) and theirs != family:
        near = [name for name in root_recipes() if about(name)["family"] == theirs]
        raise ConfigError(
            f"model.init={init}: a run of the family {printable(theirs, 100)}, and this recipe is one of {family}; take a "
            f"recipe of that family: {', '.join(near) or 'zoo list'}"
        )


def _refuse_misspelt_arch(arch: object, changes: object, origin: str, prefix: str = "model.arch.") -> None:
    """Refuse a changed key that is not in the architecture and looks like one that is; others may be right."""
    if not arch or not isinstance(arch, dict) or not isinstance(changes, dict):
        return
    for name, value in changes.items():
        if name in arch:
            _refuse_misspelt_arch(arch[name], value, origin, f"{prefix}{name}.")
            continue
        near = get_close_matches(str(name), arch, n=2, cutoff=0.6 if isinstance(value, dict) else 0.8)
        if near:
            where = f"{origin}: " if origin else ""
            hints = ", ".join(f"{prefix}{key}" for key in near)
            key, _ = next(deepest(f"{prefix}{name}", value))
            raise ConfigError(f"{where}{key}: no such key; nearest: {hints}")
