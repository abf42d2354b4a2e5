"""Rows as Python objects on their way to the ranks: written once to the run folder, where every rank maps them into memory."""

from __future__ import annotations

import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from zoo.config.derived import run_folder
from zoo.config.entries import DataEntry, entries_of, has_objects
from zoo.config.schema import Recipe
from zoo.data.sources.objects import SUFFIX, write_objects
from zoo.errors import ConfigError, UserError
from zoo.files import expanded
from zoo.launch.prepare import under_torchrun
from zoo.launch.slurm import join_slurm
from zoo.types import JsonObject
from zoo.watchdog.run_lock import refuse_second


def with_files(recipe: Recipe, data: object = None, eval_data: object = None) -> Recipe:
    """The recipe with files in the place of objects in data.train and data.eval.

    A list or an iterable of dicts becomes one file (`zoo.data.sources.objects`), a datasets.Dataset a folder of its own
    `save_to_disk`; both replace those of an earlier start whole. An iterable is read once, to its end.

    Args:
        data: entries or rows in the place of data.train; None: the recipe's.
        eval_data: the same of data.eval.

    Raises:
        UserError: objects under torchrun or SLURM, rows that can't be written, a stream, or a run folder in use.
    """
    changed = {
        key: entries_of(value, key)
        for key, value in (("data.train", data), ("data.eval", eval_data))
        if value is not None
    }
    entries: dict[str, list[object]] = {"data.train": recipe.data.train, "data.eval": recipe.data.eval, **changed}
    if not any(map(has_objects, entries.values())):
        return recipe.replace(changed) if changed else recipe
    join_slurm()
    if under_torchrun():
        raise UserError(
            "data.train: rows as Python objects need zoo.train to start the ranks; under torchrun or SLURM write them to "
            "files first (JSONL, or save_to_disk of a datasets.Dataset) and give their path"
        )
    folder = expanded(run_folder(recipe))
    refuse_second(folder)
    plain = {
        key: [
            write_entry(entry, folder / "data" / f"{key.removeprefix('data.')}-{number}", recipe.data.root, key)
            for number, entry in enumerate(some)
        ]
        for key, some in entries.items()
    }
    return recipe.replace({"data.train": [], "data.eval": []}).replace(plain)


def write_entry(entry: object, folder: Path, root: str | None, key: str) -> object:
    """An entry with a path, `place` with an ending, in the place of its rows; another entry as it is.

    Media that rows name lie in the entry's root, else in `root`, else in the current folder.
    """
    if not isinstance(entry, DataEntry):
        return entry
    if entry.rows is not None:
        path = _write(entry.rows, folder, key)
        root = entry.root if entry.root is not None else root
        entry = replace(entry, rows=None, stream=False, path=str(path), root=root or str(Path.cwd()))
    return plain_entry(entry)


def plain_entry(entry: DataEntry) -> JsonObject:
    """An entry as a mapping of what it says."""
    default = DataEntry()
    names = [item.name for item in fields(DataEntry)]
    return {name: getattr(entry, name) for name in names if getattr(entry, name) != getattr(default, name)}


def _write(rows: Any, folder: Path, key: str) -> Path:
    if isinstance(rows, dict):
        raise ConfigError(f"{key}: a {type(rows).__name__} of splits; give one, {key}=data['train']")
    if hasattr(rows, "save_to_disk"):
        if rows.format.get("type") == "custom":
            raise ConfigError(f"{key}: the data set has a transform, which no file keeps; apply it with map() first")
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        rows.save_to_disk(str(partial))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        return folder
    if hasattr(rows, "load_state_dict") and not hasattr(rows, "__len__"):
        raise ConfigError(
            f"{key}: a {type(rows).__name__} may have no end, and can't be handed to ranks; give {{hub: ..., stream: true}}, "
            "{path: ..., stream: true}, or list(data.take(10000))"
        )
    path = folder.with_name(f"{folder.name}{SUFFIX}")
    write_objects(rows, path, key)
    return path
