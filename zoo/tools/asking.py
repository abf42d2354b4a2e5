"""A checkpoint and the rows that it is asked about, as a recipe: what `zoo eval`, `generate` and `score` have in common.

Rows are read as the run read them that made the checkpoint (`zoo.model.run_settings`), and come from all that data.train takes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from zoo.checkpoint.selection import language_model
from zoo.config.compose import recipe_for_weights
from zoo.config.derived import data_parallel
from zoo.config.entries import AUTO, DataEntry, check_entries, entries_of, parse_entry
from zoo.config.layers.keys import shown_value
from zoo.config.layers.layer import Overrides, parse_value
from zoo.config.layers.tree import leaves_of
from zoo.config.locate import Place, locate, read_arch
from zoo.config.recipes.chain import split_overrides
from zoo.config.schema import Recipe
from zoo.data.loading.defaults import evaluated_on, with_defaults
from zoo.data.loading.sample_source import SampleSource
from zoo.data.processors.processor import Processor
from zoo.data.sources.formats.choose import fits
from zoo.data.sources.streams import is_stream
from zoo.data.sources.tables import check_entry, first_item
from zoo.errors import ConfigError, UserError
from zoo.files import expanded
from zoo.launch.objects import plain_entry, write_entry
from zoo.launch.prepare import world_size
from zoo.logging.result import Model, run_of
from zoo.model.meta_model import family_of
from zoo.model.run_settings import FORM, READING, SHARED, RunSettings, settings_of, source_of
from zoo.parallel.world import World
from zoo.types import JsonObject

# Keys that hold for a model that is asked, of the sections that serve training; and those of data that serve training alone.
_ASKED = {
    "run": ("run.seed", "run.deterministic"), "train": ("train.eval_rows", "train.micro_batch"), "lora": (), "distill": (), "log": (), "export": (),
}  # fmt: skip
_TRAINED = (
    "data.train",
    "data.shuffle",
    "data.lookahead",
    "data.augment",
    "data.augment_variants",
    "data.blank_answers",
)
_HOLDING = "nproc, hardware, model, parallel, packing, engine, data but for what serves training alone, "

# Rows to ask about: a path, a bundled set, "auto" (the run's held-out rows), an entry of data.train, several of these, or rows as objects.
AskedRows = Any


def recipe_of(source: Place, overrides: Overrides, *, quiet: bool = False) -> Recipe:
    """The recipe under which a checkpoint's model is run, with the settings of its run, which are said unless it is `quiet`.

    Raises:
        ConfigError: an override, or a setting of the run's, is wrong; or an override is of a key that serves training alone.
    """
    _refuse_training_keys(overrides)
    family, settings = family_of(read_arch(source.files)).name, settings_of(source)
    recipe = recipe_for_weights(str(source.folder), family, overrides, settings.layer)
    plain = recipe_for_weights(str(source.folder), family, overrides)
    changed = [
        f"{key}={shown_value(_at(recipe, key))}" for key in settings.values if _at(recipe, key) != _at(plain, key)
    ]
    if changed and not quiet:
        _say(f"settings of {settings.origin}: {', '.join(changed)}; key=value sets another")
    return recipe


@contextmanager
def asked(path: Model, rows: AskedRows, overrides: Overrides = (), *, loss: str = "nll") -> Iterator[Recipe]:
    """The recipe that asks a checkpoint's model about rows, which are its data.eval; call `run_task` with it inside the block.

    Args:
        path: where the checkpoint lies, or what names its run (`run_of`).
        rows: see `AskedRows`. None is "auto", or what an override says of data.eval.
        overrides: of the recipe.
        loss: `reward` for the checkpoint of a reward model, `embed` for that of an embedding model.

    Raises:
        UserError: no such checkpoint or rows, those of a model without a head under `nll`, or an override that is wrong.
    """
    path = run_of(path)
    source = language_model(path) if loss == "nll" else locate(path)
    settings = settings_of(source)
    recipe = recipe_of(source, overrides)
    recipe = recipe.replace({"train.loss": loss})
    overridden = set(leaves_of(Recipe, split_overrides(overrides)[0].tree))
    if "data.eval" in overridden:
        if rows is not None:
            raise UserError(f"rows and data.eval say both which rows are asked about; leave out one of them: {rows}")
        rows = list(recipe.data.eval)
    root = recipe.data.root if "data.root" in overridden else None  # a program names media from its own folder
    with tempfile.TemporaryDirectory(prefix="zoo-rows-") as folder:
        if rows is None or (isinstance(rows, str) and rows == AUTO):
            recipe, entries = _own_rows(recipe, settings, str(path))
        else:
            entries = []
            for number, entry in enumerate(entries_of(_parsed(rows), "rows")):
                written = write_entry(entry, Path(folder) / f"rows-{number}", root, "rows")
                entries.append(_as_read_by_run(parse_entry(written, "rows"), settings))
            if not any(Path(entry.path or "").is_relative_to(folder) for entry in entries):  # rows by name
                _say_where_rows_differ(recipe, settings, entries)
        if not entries:
            raise UserError("rows: there are none; wanted a file, an entry as data.train takes it, or a list of dicts")
        check_entries([], entries)
        for entry in entries:
            check_entry(entry, "rows")
        unlimited: JsonObject = {name: None for name in SHARED if f"data.{name}" in overridden}
        yield for_rows(recipe, [plain_entry(replace(entry, **unlimited)) for entry in entries])


def _refuse_training_keys(overrides: Overrides) -> None:
    """ConfigError for overrides of keys that have no effect where a model is asked: all of them at once."""
    keys = list(leaves_of(Recipe, split_overrides(overrides)[0].tree))
    idle = [key for key in keys if key in _TRAINED or key not in _ASKED.get(key.partition(".")[0], (key,))]
    if idle:
        effective = ", ".join(key for keys in _ASKED.values() for key in keys)
        rows = "; rows are named after the model, or by data.eval" if "data.train" in idle else ""
        raise ConfigError(
            f"{', '.join(idle)}: no effect on a model that is asked{rows}; leave {'it' if len(idle) == 1 else 'them'} out. "
            f"Keys that have one: {_HOLDING}{effective}"
        )


def check_counts(**counts: object) -> None:
    """Refuse numbers of rows by name that are no whole numbers from 1; None is no limit."""
    for name, value in counts.items():
        if value is not None and not (type(value) is int and value >= 1):
            raise UserError(f"{name}={shown_value(value)}: wanted a whole number from 1")


def for_rows(recipe: Recipe, entries: Sequence[object]) -> Recipe:
    """The recipe with these rows, without what serves training alone, and with a batch that fits any layout."""
    replicas = max(1, data_parallel(recipe, world_size(recipe)))
    return recipe.replace(
        {
            "data.eval": list(entries),
            "data.outside_root": True,  # rows of a program name their media by absolute paths
            "train.mtp_loss": 0.0,
            "train.global_batch": replicas * recipe.train.micro_batch * recipe.parallel.pp,
        }
    )


def open_asked(recipe: Recipe, processor: Processor, max_rows: int | None = None) -> SampleSource:
    """The samples of data.eval, of `max_rows` of them at most."""
    limits: JsonObject = {"budget": recipe.packing.budget, "align": recipe.packing.align or 1, "max_rows": max_rows}
    limits["embed"] = recipe.embed if recipe.train.embeds else None
    return SampleSource.open(recipe.data.eval, processor, recipe.data, evaluation=True, **limits)


def say_left_out(source: SampleSource, world: World) -> None:
    """Say on the first rank's stderr which rows of the source were left out."""
    if source.counts and world.is_main:
        print(f"rows left out: {source.bad_rows.summary()}", file=sys.stderr)


def _parsed(rows: AskedRows) -> AskedRows:
    """Entries that are written as YAML, as a command has them."""
    if isinstance(rows, Path):
        return str(rows)
    if isinstance(rows, str) and rows.lstrip()[:1] in ("{", "[") and not expanded(rows).exists():
        return parse_value("rows", rows)
    return rows


def _own_rows(recipe: Recipe, settings: RunSettings, name: str) -> tuple[Recipe, list[DataEntry]]:
    """The held-out rows of the run, and the recipe with as many of them as the run took."""
    if not settings.rows:
        raise UserError(
            f"{name}: it is no run, which has held-out rows; say which rows to take: a file, or digits:heldout"
        )
    whole = recipe.replace(dict(settings.rows))
    entries: list[DataEntry] = with_defaults(whole.data).eval
    if not entries:
        raise UserError(f"{name}: its run held out no rows; say which rows to take: a file, or digits:heldout")
    _say(f"rows that the run evaluated on: {', '.join(evaluated_on(whole.data))}")
    return recipe.replace({"train.eval_rows": recipe.train.eval_rows or whole.train.eval_rows}), entries


def _say_where_rows_differ(recipe: Recipe, settings: RunSettings, entries: Sequence[DataEntry]) -> None:
    """Say which rows the run evaluated on, where rows that are named are others: its scores are then none of the run's."""
    if not settings.rows:
        return
    whole = recipe.replace(dict(settings.rows)).data
    run_entries = with_defaults(whole).eval
    taken = [(source_of(entry), entry.kinds, entry.held_out) for entry in entries]
    if run_entries and taken != [(source_of(entry), entry.kinds, entry.held_out) for entry in run_entries]:
        rows = ", ".join(entry.selected for entry in entries)
        _say(f"rows: {rows}; the run evaluated on others: {', '.join(evaluated_on(whole))} (rows=auto takes those)")


def _as_read_by_run(entry: DataEntry, settings: RunSettings) -> DataEntry:
    """The entry with what the run says of the same rows, or of all its rows where these are such."""
    same = next(
        (entry_of_run for entry_of_run in settings.entries if source_of(entry_of_run) == source_of(entry)), None
    )
    if same is not None:
        more = {name: getattr(same, name) for name in READING if getattr(entry, name) is None}
    elif settings.form and not (entry.format or entry.columns or is_stream(entry)):
        item = first_item(entry, "rows")
        more = dict(settings.form) if item is not None and fits(item, **settings.form) else {}
    else:
        return entry
    more = {name: value for name, value in more.items() if value is not None}
    shown = [f"{name}={shown_value(value)}" for name, value in more.items() if name in FORM]
    if shown:
        _say(f"rows of {entry} are read as the run's: {', '.join(shown)}")
    return replace(entry, **more)


def _at(recipe: Recipe, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(recipe, section), name)


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # of torchrun's ranks, one
        print(f"zoo: {line}", file=sys.stderr, flush=True)
