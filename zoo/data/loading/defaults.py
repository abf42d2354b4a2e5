"""Defaults of the data that follow from the rows trained on: rows to evaluate on, and random changes to training rows.

Settings that a size or recipe has for the bundled set hold for that set alone. A run on your rows evaluates on your rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zoo.config.entries import AUTO, DataEntry, parse_entry
from zoo.config.schema import DataConfig
from zoo.data.sources.lines import is_bundled

VARIANTS = 8  # different changes of a row, where nothing else is said


def with_defaults(data: DataConfig) -> DataConfig:
    """The same with every entry of eval, augment, augment_variants and blank_answers filled in.

    `auto` in eval stands for the held-out rows of data.train: of entries with `held_out` those rows, and where nothing but
    bundled sets is trained on, their held-out split.

    Raises:
        ConfigError: an entry is malformed.
    """
    train = [parse_entry(spec, "data.train") for spec in data.train]
    own = [entry for entry in train if not _bundled(entry)]
    changes: dict[str, Any] = {"augment": 0.0, "augment_variants": VARIANTS, "blank_answers": 0.0}
    if not own:
        changes |= data.bundled
    changes |= {key: value for key in changes if (value := getattr(data, key)) is not None}
    changes["augment_variants"] = int(changes["augment_variants"])
    evals: list[DataEntry] = []
    for spec in data.eval:
        evals += _held_out(own or train) if spec == AUTO else [parse_entry(spec, "data.eval")]
    return replace(data, eval=evals, **changes)


def evaluated_on(data: DataConfig) -> list[str]:
    """The names of the entries to evaluate on, with the share that is held out of each."""
    entries = with_defaults(data).eval
    return [f"{entry.held_out:g} of {entry}" if entry.held_out else str(entry) for entry in entries]


def _held_out(train: list[DataEntry]) -> list[DataEntry]:
    """The entries to evaluate on: the held-out rows of these."""
    found: list[DataEntry] = []
    for entry in train:
        entry = replace(entry, weight=None, epochs=None)
        if entry.held_out is None and _bundled(entry):
            entry = replace(entry, path=f"{str(entry.path).partition(':')[0]}:heldout")
        elif entry.held_out is None:
            continue
        found += [] if entry in found else [entry]
    return found


def _bundled(entry: DataEntry) -> bool:
    return entry.path is not None and is_bundled(entry.path)
