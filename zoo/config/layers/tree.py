"""A typed tree of keys that layers are set in: unknown keys and wrong types are refused, each with one sentence.

The schema is any frozen dataclass of dataclasses (`zoo.config.schema.Recipe` is the one of recipes).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zoo.config.layers.foreign import foreign_hint
from zoo.config.layers.keys import choices_of, keys, sections, shown_value, unknown_hint
from zoo.config.layers.layer import Edit, Layer, layer_of, merge_into, nested, plain_values
from zoo.errors import ConfigError, printable
from zoo.types import JsonMapping, JsonObject

_MOST_PROBLEMS = 60  # unknown keys that are looked at
_SHOWN = 40  # mistakes that a message names


def schema_tree(schema: type) -> DictConfig:
    """A dataclass's default values as a typed OmegaConf tree that can be written to."""
    tree: DictConfig = pickle.loads(_pickled_tree(schema))
    return tree


@cache
def _pickled_tree(schema: type) -> bytes:
    """The schema's tree of keys, pickled: to build one takes 40 times as long as to read it."""
    tree = OmegaConf.structured(_with_texts(schema))
    for section in ("", *sections(schema)):
        node = OmegaConf.select(tree, section) if section else tree
        OmegaConf.set_readonly(node, False)
        node._metadata.object_type = node._metadata.ref_type = node._metadata.object_type.schema
    return pickle.dumps(tree)


@cache
def _with_texts(schema: type) -> type:
    """The dataclass with `str` for each Literal, which OmegaConf does not know before 2.4; `schema` of it is the dataclass itself."""
    hints, made = get_type_hints(schema), []
    for item in fields(schema):
        hint: Any = hints[item.name]
        factory: Any = item.default_factory
        if is_dataclass(hint):
            hint = factory = _with_texts(factory)
        elif choices_of(hint):
            hint = str | None if get_origin(hint) is not Literal else str
        made.append((item.name, hint, field(default=item.default, default_factory=factory)))
    return make_dataclass(schema.__name__, made, frozen=True, kw_only=True, namespace={"schema": schema})


def schema_of(tree: DictConfig) -> type:
    """The dataclass that the tree was made from."""
    schema = OmegaConf.get_type(tree)
    assert schema is not None
    return schema


def apply(tree: DictConfig, layer: Layer) -> JsonObject:
    """Set what `layer` says in `tree`, and return it by key; raises ConfigError for an unknown key or a wrong type.

    A run's length is said in steps or in epochs: a layer that sets one of them clears the other.
    """
    where = f"{layer.origin}: " if layer.origin else ""
    leaves = leaves_of(schema_of(tree), layer.tree, where)
    for key, other_key in (("train.steps", "train.epochs"), ("train.epochs", "train.steps")):
        if leaves.get(key) is not None and other_key not in leaves:
            OmegaConf.update(tree, other_key, None)
    wrong = []
    for key, value in leaves.items():
        try:
            set_key(tree, key, value, where)
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError(together(wrong))
    for edit in layer.edits:
        _edit(tree, edit)
    return leaves


def _edit(tree: DictConfig, edit: Edit) -> None:
    """Set an entry of a list, or a key of the entry; a text that gets a key is the entry's path."""
    known = [key.key for key in keys(schema_of(tree)).values() if key.type.startswith("list")]
    if edit.key not in known:
        raise ConfigError(f"{edit.key}[{edit.index}]: {edit.key} is no list; lists are {', '.join(known)}")
    entries: Any = OmegaConf.to_container(OmegaConf.select(tree, edit.key), resolve=False)
    if edit.index >= len(entries):
        raise ConfigError(
            f"{edit.key}[{edit.index}]: {edit.key} has {len(entries)} entries, counted from 0; give a whole list, "
            f"{edit.key}=[...], to have more"
        )
    value = edit.value
    if edit.rest:
        entry = entries[edit.index]
        entry = {"path": entry} if isinstance(entry, str) else dict(entry)
        merge_into(entry, nested(".".join(edit.rest), value))
        value = entry
    entries[edit.index] = value
    set_key(tree, edit.key, entries, "")


class Unknown(NamedTuple):
    """A key that there is not."""

    key: str  # down to the first value, as the user typed it
    value: object
    problem: str  # what to do, in a few words


def leaves_of(schema: type, tree: JsonMapping, where: str = "") -> JsonObject:
    """Everything the nested dicts set, by dotted key; unknown keys are refused, all at once."""
    leaves, unknown = read_leaves(schema, tree)
    if unknown:
        raise ConfigError(together([f"{where}{wrong.problem}" for wrong in unknown]))
    return leaves


def read_leaves(schema: type, tree: JsonMapping, prefix: str = "") -> tuple[JsonObject, list[Unknown]]:
    """Everything the nested dicts set, by dotted key, and the keys among them that there are not."""
    known, leaves, unknown = keys(schema), dict[str, object](), list[Unknown]()
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in sections(schema):
            if value is not None and not isinstance(value, dict):
                hint = foreign_hint(key) or f"set its keys, {key}.<key>=value"
                problem = f"{key}={shown_value(value)}: {key} is a section; {hint}"
                unknown.append(Unknown(key, value, problem))
                continue
            inner, wrong = read_leaves(schema, value or {}, f"{key}.")
            leaves |= inner
            unknown += wrong
        elif key in known and (not isinstance(value, dict) or known[key].type.startswith(("dict", "list[Any]"))):
            leaves[key] = value
        else:
            for deep, held in deepest(key, value):
                if len(unknown) >= _MOST_PROBLEMS:  # each of which is compared with all keys
                    break
                hint = foreign_hint(deep) or foreign_hint(key) or unknown_hint(schema, deep)
                unknown.append(Unknown(deep, held, f"{printable(deep, 200)}: no such key; {hint}"))
    return leaves, unknown


def together(problems: Sequence[str]) -> str:
    """Several mistakes as one message: one as it is, several a line each."""
    shown = list(dict.fromkeys(problems))
    if len(shown) == 1:
        return shown[0]
    more = [f"  and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
    return "\n".join([f"{len(shown)} mistakes:", *(f"  {line}" for line in shown[:_SHOWN]), *more])


def deepest(key: str, value: object) -> Iterator[tuple[str, object]]:
    """The dotted keys down to values, as the user typed them."""
    if isinstance(value, dict) and value:
        for name, held in value.items():
            yield from deepest(f"{key}.{name}", held)
    else:
        yield key, value


def set_key(tree: DictConfig, key: str, value: object, where: str = "") -> None:
    """Set one leaf, converted to the type of the schema."""
    known = keys(schema_of(tree))[key]
    kind = known.type
    if kind.startswith("list") and isinstance(value, str | dict):
        value = [value]
    if key == "data.eval" and (value is None or (isinstance(value, list) and str(value).lower() == "['none']")):
        value = []
    held = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    odd = kind == "list[Any]" and (
        not isinstance(value, list | tuple | None) or not all(isinstance(entry, str | dict) for entry in held)
    )
    nested_in = not kind.endswith("Any]") and any(isinstance(entry, list | tuple | dict) for entry in held)
    loose_bool = kind.startswith("bool") and isinstance(value, int) and value not in (0, 1)
    outside = bool(known.choices) and value is not None and str(value) not in known.choices
    try:
        if loose_bool or outside or odd or nested_in:
            raise ValueError
        OmegaConf.update(tree, key, value, merge=True)
        number = OmegaConf.select(tree, key)
        if known.bounds is not None and number is not None:
            listed = number.values() if isinstance(number, DictConfig) else number
            if not all(map(known.bounds.hold, listed if isinstance(listed, Iterable) else [listed])):
                raise ValueError
    except (OmegaConfBaseException, ValueError, TypeError, ArithmeticError):
        raise ConfigError(f"{where}{key}={shown_value(value)}: wanted {known.wanted}") from None


def to_values(tree: DictConfig) -> Any:
    """The dataclass that the tree was made from, with the values that were set in it."""
    try:
        return OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "recipe"
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from None


def replaced[S](values: S, changes: JsonMapping) -> tuple[S, set[str]]:
    """A copy of a dataclass with other values, such as ``{"parallel.tp": 2}``, which are checked like overrides.

    Returns:
        the copy, and the keys that `changes` name; of a whole section as a dataclass those that differ.
    """
    tree, before, changed = schema_tree(type(values)), values_of(values), set[str]()
    apply(tree, layer_of(plain_values(values, whole=True).items()))
    for key, value in changes.items():
        layer = layer_of(plain_values({key: value}, whole=True).items())
        leaves = apply(tree, layer)
        changed |= {name for name, new in leaves.items() if not is_dataclass(value) or new != before[name]}
        changed |= {edit.key for edit in layer.edits}
    return to_values(tree), changed


def values_of(values: object) -> JsonObject:
    """Every key of a dataclass of dataclasses with its value."""
    schema: type = type(values)
    return {key: attrgetter(key)(values) for key in keys(schema)}
