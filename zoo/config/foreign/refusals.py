"""Refusals of what other trainers call their settings: all of a command line or a file at once, each with what zoo has for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zoo.config.entries import unknown_keys
from zoo.config.files import as_path
from zoo.config.foreign.programs import flattened, leaf, program_of
from zoo.config.foreign.translation import Load, translate
from zoo.config.layers.foreign import foreign_hint
from zoo.config.layers.layer import Edit, Layer
from zoo.config.layers.reader import UnreadableError, read_text, read_yaml
from zoo.config.layers.tree import read_leaves, together
from zoo.config.recipes.chain import CHOICES, FILE_KEYS
from zoo.config.recipes.matrix import recipe_names
from zoo.config.schema import Recipe
from zoo.errors import ConfigError
from zoo.types import JsonMapping


def refuse_foreign_file(name_or_path: str, load: Load, overrides: Layer) -> None:
    """ConfigError for a file that was written for another trainer, with the command that does the same here.

    The overrides behind the file, in zoo's names or in those of the trainer, replace what the file says.
    """
    path = as_path(name_or_path)
    if path is None or not path.is_file():
        return
    try:
        tree = read_yaml(read_text(path))
    except (UnreadableError, OSError):
        return  # which reading it says
    program = program_of(tree) if isinstance(tree, dict) and all(isinstance(key, str) for key in tree) else None
    if program is None:
        return
    leaves, unknown = read_leaves(Recipe, overrides.tree)
    typed = leaves | {key: overrides.tree[key] for key in CHOICES if key in overrides.tree}
    typed |= {edit.path: edit.value for edit in overrides.edits}
    foreign = {wrong.key: wrong.value for wrong in unknown if wrong.key not in CHOICES}
    names = {leaf(key) for key in foreign}
    flat = {key: value for key, value in flattened(tree) if leaf(key) not in names} | foreign
    raise ConfigError(
        f"{name_or_path}: a file of {program}, and no recipe; what comes to the same here:\n{translate(flat, load, program, zoo_keys=typed)}"
    )


def refuse_unknown(recipe: str, layers: Sequence[Layer], load: Load) -> None:
    """ConfigError for keys that there are not, of the user's files and the command line together.

    Args:
        recipe: its name, as the user gave it.
        layers: the user's files, and the overrides last.
        load: as `translate` takes it.
    """
    problems, foreign = list[str](), 0
    for layer in layers:
        where = f"{layer.origin}: " if layer.origin else ""
        tree = {key: value for key, value in layer.tree.items() if key not in FILE_KEYS}
        leaves, unknown = read_leaves(Recipe, tree)
        problems += [f"{where}{wrong.problem}" for wrong in unknown]
        problems += [f"{where}{problem}" for problem in _entry_mistakes(leaves, layer.edits)]
        foreign += sum(foreign_hint(wrong.key) is not None for wrong in unknown if not layer.origin)
    if not problems:
        return
    answer = together(problems)
    if len(problems) > 1 and foreign > 1 and recipe in recipe_names():
        leaves, unknown = read_leaves(Recipe, layers[-1].tree)  # zoo's own mappings whole
        flat = leaves | {wrong.key: wrong.value for wrong in unknown}
        answer += f"\nwhat comes to the same here:\n{translate(flat, load, recipe=recipe)}"
    raise ConfigError(answer)


def _entry_mistakes(leaves: JsonMapping, edits: Sequence[Edit]) -> Iterator[str]:
    """Mistakes in the keys of entries of data.train and data.eval."""
    for key in ("data.train", "data.eval"):
        value = leaves.get(key)
        entries = value if isinstance(value, list | tuple) else [value]
        for entry in entries:
            if isinstance(entry, Mapping):
                yield from (f"{key}: {problem}" for problem in unknown_keys(entry))
        for edit in edits:
            if edit.key == key:
                yield from (f"{key}[{edit.index}]: {problem}" for problem in unknown_keys(edit.rest[:1]))
