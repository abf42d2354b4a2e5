"""From a recipe's name and overrides to one resolved recipe.

What is said later wins::

    schema defaults < recipe < size overlay < hardware overlay < the user's own file < overrides

The user's own file is a YAML that names a `base:` recipe: it is overrides kept in a file, so an overlay does not
undo what it says. A file without `base:` is itself the recipe. With `model.init` a Hugging Face folder, the
architecture is that of the folder, and no size is chosen unless `size=` is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zoo.config.devices import gpu_count
from zoo.config.files import (
    Layer,
    parse_value,
    read_hardware,
    read_recipe,
    read_size,
    recipe_names,
    size_names,
)
from zoo.config.locate import look, read_arch
from zoo.config.reference import keys, nearest_keys, sections, show_value, wanted
from zoo.config.schema import CHOICES, Recipe
from zoo.errors import ConfigError
from zoo.registry import get_family

__all__ = [
    "ConfigError",
    "Resolved",
    "load_recipe",
    "recipe_for_weights",
    "replace_in",
    "resolve",
    "save_recipe",
]

# Top-level keys of a recipe file that are about the file and no part of the recipe.
_SAVED = "# A resolved recipe: every key has its value, no overlay is applied when it is loaded."
MAPPINGS = ("dict[str, Any]", "dict[str, float]", "list[Any]")  # types of keys that a mapping may be given
FILE_KEYS = ("description", "published_size", "tiny_size", "base", "resolved")


@dataclass(frozen=True)
class Resolved:
    """A recipe and how its size came about."""

    recipe: Recipe
    size_why: str  # why this size, in a few words


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of that name or YAML path, resolved.

    Args:
        name_or_path: a name that `zoo list` shows, or a path of a YAML file (also a run's `config.yaml`).
        overrides: ``a.b=c`` or ``--a.b=c``, values read as YAML.

    Raises:
        ConfigError: a name, key or value is wrong; the message says which and what was wanted.
    """
    return resolve(str(name_or_path), overrides).recipe


def resolve(name_or_path: str, overrides: Sequence[str] = ()) -> Resolved:
    """:func:`load_recipe`, with the reason for the size that was taken."""
    typed = _override_layer(overrides)
    chain = _base_chain(name_or_path)
    root, own = chain[0], [*chain[1:], typed]
    layers, stamps = [_without_file_keys(root)], {}
    if root.tree.get("resolved"):
        _refuse_overlays(own, root.origin)
        why = f"as resolved in {root.origin}"
    else:
        choice = _choose_overlays(root, own)
        layers += _overlays(choice)
        stamps = {"recipe": name_or_path, "size": choice.size, "hardware": choice.hardware}
        why = choice.why
    tree = _schema_tree(Recipe())
    for layer in layers:
        _apply(tree, layer)
    _take_arch_of_init(tree, own)
    for layer in own:
        _refuse_misspelt_arch(
            OmegaConf.to_container(tree.model.arch), _last([layer], "model.arch"), layer.origin
        )
        _apply(tree, _without_file_keys(layer))
    for key, value in stamps.items():
        _set(tree, key, value, "")
    return Resolved(_to_recipe(tree), why)


def recipe_for_weights(init: str, family: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe that does no more than name weights, which lie here, and their family.

    Raises:
        ConfigError: an override is wrong.
    """
    tree = _schema_tree(Recipe())
    _apply(tree, Layer("", {"model": {"family": family, "init": init}, "train": {"steps": 1}}))
    typed = _override_layer(overrides)
    _take_arch_of_init(tree, [typed])
    _apply(tree, typed)
    return _to_recipe(tree)


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write `recipe` as a YAML file that :func:`load_recipe` resolves to an equal recipe."""
    text = OmegaConf.to_yaml(OmegaConf.create(asdict(recipe)))
    Path(path).write_text(f"{_SAVED}\nresolved: true\n{text}", encoding="utf-8")


def is_saved_recipe(path: str | Path) -> bool:
    """Whether :func:`save_recipe` wrote that file."""
    return Path(path).read_text(encoding="utf-8", errors="replace").startswith(_SAVED)


def replace_in(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A copy of `recipe` with other values, such as ``{"parallel.tp": 2}``; checked like an override."""
    tree = _schema_tree(Recipe())
    _apply(tree, Layer("", asdict(recipe)))
    for key, value in changes.items():
        _apply(tree, Layer("", _nested(key, value)))
    return _to_recipe(tree)


def _override_layer(overrides: Sequence[str]) -> Layer:
    """All overrides as one layer; the last one wins where a key is given twice."""
    tree: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.removeprefix("--").partition("=")
        if not equals or not key:
            raise ConfigError(f"{text}: an override is written key=value, such as train.steps=100")
        if key == "recipe":
            raise ConfigError(f"{text}: the recipe is named once, before its overrides")
        _merge_into(tree, _nested(key, parse_value(key, value)))
    return Layer("", tree)


def _nested(key: str, value: Any) -> dict[str, Any]:
    """``a.b.c`` and a value as nested dicts."""
    *outer, last = key.split(".")
    tree: dict[str, Any] = {last: value}
    for name in reversed(outer):
        tree = {name: tree}
    return tree


def _merge_into(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            _merge_into(tree[name], value)
        else:
            tree[name] = value


def _base_chain(name_or_path: str) -> list[Layer]:
    """The recipe at the root and the files that stand on it through `base:`, root first."""
    chain = [read_recipe(name_or_path)]
    while (base := chain[0].tree.get("base")) is not None:
        layer = read_recipe(str(base), beside=Path(chain[0].origin).parent)
        if layer.origin in [seen.origin for seen in chain]:
            raise ConfigError(f"{chain[0].origin}: base: {base} leads back to itself")
        chain.insert(0, layer)
    return chain


def _without_file_keys(layer: Layer) -> Layer:
    """The layer without the keys about the file, and without those that name overlays unless it is resolved."""
    drop = set(FILE_KEYS)
    if not layer.tree.get("resolved"):
        if "recipe" in layer.tree:
            raise ConfigError(f"{layer.origin}: recipe: a file names the recipe it stands on as base: NAME")
        drop |= {"size", "hardware"}
    return Layer(layer.origin, {key: value for key, value in layer.tree.items() if key not in drop})


def _refuse_overlays(own: Sequence[Layer], origin: str) -> None:
    for layer in own:
        for key in ("size", "hardware"):
            if key in layer.tree:
                raise ConfigError(
                    f"{key}={layer.tree[key]}: {origin} is a resolved recipe, to which no overlay is applied; "
                    f"name the recipe it came from instead"
                )


@dataclass(frozen=True)
class _Choice:
    """The overlays to apply, and why that size."""

    family: str
    size: str | None
    hardware: str | None
    why: str


def _choose_overlays(root: Layer, own: Sequence[Layer]) -> _Choice:
    layers = [root, *own]
    family = str(_last(layers, "model.family") or Recipe().model.family)
    hardware, size = _last(layers, "hardware"), _last(layers, "size")
    published = root.tree.get("published_size")
    if size is not None:
        why = "given"
    elif _hf_config(_last(layers, "model.init")) is not None:
        why = "architecture of model.init"
    elif published is None and _last(layers, "model.arch"):
        why = "architecture given in model.arch"
    elif gpu_count():
        size, why = published, "the published size: a GPU is here"
    else:
        size = root.tree.get("tiny_size", "tiny")
        why = "no GPU is here" + (f"; published: size={published}" if published else "")
    if size is not None and not family:
        _refuse_no_family(layers)
    return _Choice(family, size and str(size), hardware and str(hardware), why)


def _refuse_no_family(layers: Sequence[Layer]) -> None:
    """A file that says nothing of a model: a misspelt key in it is named first."""
    for layer in layers:
        dict(_leaves(_without_file_keys(layer).tree, "", f"{layer.origin}: " if layer.origin else ""))
    raise ConfigError(
        f"{layers[0].origin}: model.family is not set; write `base: {recipe_names()[0]}` (or another recipe) "
        f"as its first line"
    )


def _last(layers: Sequence[Layer], key: str) -> Any:
    """The value of `key` in the last layer that has it, or None."""
    for layer in reversed(layers):
        value: Any = layer.tree
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            return value
    return None


def _overlays(choice: _Choice) -> list[Layer]:
    layers = []
    if choice.size is not None:
        if not size_names(choice.family):
            get_family(choice.family)  # a misspelt family is named as such
        layers.append(_without_file_keys(read_size(choice.family, choice.size)))
    if choice.hardware is not None:
        layers.append(_without_file_keys(read_hardware(choice.hardware)))
    return layers


def _take_arch_of_init(tree: DictConfig, own: Sequence[Layer]) -> None:
    """Put the config of a Hugging Face folder in the place of the size's architecture."""
    arch = _hf_config(_last(own, "model.init") or tree.model.init)
    if arch is not None:
        tree.model.arch = arch


def _refuse_misspelt_arch(arch: Any, changes: Any, origin: str, prefix: str = "model.arch.") -> None:
    """Refuse a changed key that is not in the architecture and looks like one that is.

    Others pass: what may stand in a Hugging Face config is not known here.
    """
    if not arch or not isinstance(arch, dict) or not isinstance(changes, dict):
        return
    for name, value in changes.items():
        if name in arch:
            _refuse_misspelt_arch(arch[name], value, origin, f"{prefix}{name}.")
            continue
        near = get_close_matches(name, arch, n=2, cutoff=0.6 if isinstance(value, dict) else 0.8)
        if near:
            where = f"{origin}: " if origin else ""
            hints = ", ".join(f"{prefix}{key}" for key in near)
            raise ConfigError(f"{where}{_deepest(prefix + name, value)}: no such key; nearest: {hints}")


def _hf_config(init: Any) -> dict[str, Any] | None:
    """The `config.json` of weights that lie here; None when `init` is no path of any."""
    place = look(init) if isinstance(init, str) else None
    if place is None or not (place.files / "config.json").is_file():
        return None
    return read_arch(place.files, f"model.init={init}")


def _schema_tree(recipe: Recipe) -> DictConfig:
    """The recipe as a typed OmegaConf tree that can be written to."""
    tree = OmegaConf.structured(recipe)
    OmegaConf.set_readonly(tree, False)
    for section in sections():
        OmegaConf.set_readonly(OmegaConf.select(tree, section), False)
    return tree


def _apply(tree: DictConfig, layer: Layer) -> None:
    """Set what `layer` says in `tree`; raises ConfigError for an unknown key or a wrong type.

    A run's length is said in steps or in epochs: a layer that sets one of them clears the other.
    """
    where = f"{layer.origin}: " if layer.origin else ""
    leaves = dict(_leaves(layer.tree, "", where))
    for one, other in (("train.steps", "train.epochs"), ("train.epochs", "train.steps")):
        if leaves.get(one) is not None and other not in leaves:
            OmegaConf.update(tree, other, None)
    for key, value in leaves.items():
        _set(tree, key, value, where)


def _leaves(tree: Mapping[str, Any], prefix: str, where: str) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything the nested dicts set; unknown keys are refused."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in sections():
            if value is not None and not isinstance(value, dict):
                raise ConfigError(
                    f"{where}{key}={show_value(value)}: {key} is a section; set its keys, {key}.<key>=value"
                )
            yield from _leaves(value or {}, f"{key}.", where)
        elif key in keys() and (not isinstance(value, dict) or keys()[key].type in MAPPINGS):
            yield key, value
        else:
            key = _deepest(key, value)
            near = nearest_keys(key)
            hint = f"nearest: {', '.join(near)}" if near else "`zoo show --schema` lists the keys"
            raise ConfigError(f"{where}{key}: no such key; {hint}")


def _deepest(key: str, value: Any) -> str:
    """The dotted key down to the first value, as the user typed it."""
    while isinstance(value, dict) and value:
        name = next(iter(value))
        key, value = f"{key}.{name}", value[name]
    return key


def _set(tree: DictConfig, key: str, value: Any, where: str) -> None:
    """Set one leaf, converted to the type of the schema."""
    kind = keys()[key].type
    if (kind == "list[str]" and isinstance(value, str)) or (
        kind == "list[Any]" and not isinstance(value, list)
    ):
        value = [value]
    loose_bool = kind.startswith("bool") and isinstance(value, int) and value not in (0, 1)
    outside = key in CHOICES and value is not None and str(value) not in CHOICES[key]
    no_entry = kind == "list[Any]" and not all(isinstance(item, str | dict) for item in value)
    try:
        if loose_bool or outside or no_entry:
            raise ValueError
        OmegaConf.update(tree, key, value, merge=True)
    except (OmegaConfBaseException, ValueError, TypeError):
        raise ConfigError(f"{where}{key}={show_value(value)}: wanted {wanted(key)}") from None


def _to_recipe(tree: DictConfig) -> Recipe:
    try:
        recipe = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "recipe"
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from None
    assert isinstance(recipe, Recipe)
    return recipe
