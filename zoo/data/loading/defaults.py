"""Defaults of the data that follow from the rows trained on: rows to evaluate on, and random changes to training rows.

Settings that a size or recipe has for the bundled set hold for that set alone. A run on your rows evaluates on your rows.
"""

from __future__ import annotations

from dataclasses import replace

from zoo.config.entries import AUTO, DataEntry, held_out_entries, only_bundled, parse_entry
from zoo.config.schema import DataConfig
from zoo.types import JsonObject

VARIANTS = 8  # different changes of a row, where nothing else is said


def with_defaults(data: DataConfig) -> DataConfig:
    """The same with every entry of eval, augment, augment_variants and blank_answers filled in.

    `auto` in eval stands for `held_out_entries` of data.train.

    Raises:
        ConfigError: an entry is malformed.
    """
    train = [parse_entry(spec, "data.train") for spec in data.train]
    changes: JsonObject = {"augment": 0.0, "augment_variants": VARIANTS, "blank_answers": 0.0}
    if only_bundled(train):
        changes |= data.bundled
    changes |= {key: value for key in changes if (value := getattr(data, key)) is not None}
    changes["augment_variants"] = int(changes["augment_variants"])
    evals: list[DataEntry] = []
    for spec in data.eval:
        evals += held_out_entries(train) if spec == AUTO else [parse_entry(spec, "data.eval")]
    return replace(data, eval=evals, **changes)


def evaluated_on(data: DataConfig) -> list[str]:
    """The names of the entries to evaluate on, with the share that is held out of each and its kinds of rows."""
    entries = with_defaults(data).eval
    return [f"{entry.held_out:g} of {entry.selected}" if entry.held_out else entry.selected for entry in entries]
