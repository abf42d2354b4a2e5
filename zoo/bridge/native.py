"""zoo's own weights on disk: safetensors under zoo's names, whole tensors, which any parallel layout cuts its parts from.

    FOLDER/zoo.json     format, family, the layouts that exports keep, what a conversion was allowed to leave out, and dtypes
                        of published tensors that share one of zoo's with wider ones
    FOLDER/hf/          config.json and the files of tokenizer and processor, as Hugging Face has them
    FOLDER/weights/     model.safetensors, or its shards and their index; `carried.<published name>` is not trained
    FOLDER/zoo_files.json   what was written, with the checksums of the weights (XXH3)

The same reader and the same checks serve it as serve Hugging Face's folders: `native` gives a table in which each name
stands for itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from zoo.bridge.files.headers import DTYPES, CheckpointError
from zoo.bridge.mapping.rules import Layout
from zoo.bridge.mapping.table import Bridge, Entry
from zoo.config.locate import ABOUT
from zoo.errors import printable
from zoo.records import Check, are_texts, is_text, is_texts_by_name, read_record
from zoo.types import JsonObject

PASS_THROUGH = "carried."
FORMAT = 2
_ABOUT: dict[str, Check] = {
    "family": is_text, "allow": are_texts, "allowed": are_texts, "layouts": is_texts_by_name,
    "changed": is_texts_by_name,
    "dtypes": lambda value: value is None or (is_texts_by_name(value) and all(name in DTYPES for name in value.values())),
}  # fmt: skip


def read_about(folder: str | Path) -> JsonObject:
    """What zoo.json says; CheckpointError for one of another format."""
    path = Path(folder) / ABOUT
    about = read_record(path, _ABOUT, hint="take another copy, or convert the source again", error=CheckpointError)
    if about.get("format") != FORMAT:
        seen = printable(repr(about.get("format")), 100)
        raise CheckpointError(f"{path}: format {seen}, wanted {FORMAT}; was it written by another zoo?")
    return about


def layouts_of(entries: Iterable[Entry]) -> dict[str, str]:
    """What zoo.json keeps of the layouts that tensors were read in: zoo name -> first Hugging Face name, as `Entry.kept_layout` gives it."""
    return {entry.zoo: name for entry in entries if (name := entry.kept_layout) is not None}


def read_layouts(folder: str | Path) -> Mapping[str, str]:
    """`layouts_of` the weights in a folder. CheckpointError for what is no such record."""
    layouts: Mapping[str, str] = read_about(folder).get("layouts", {})
    return layouts


def in_layouts(entries: Mapping[str, Entry], layouts: Mapping[str, str], folder: str | Path) -> dict[str, Entry]:
    """Published entries by zoo name, in the `layouts` that the folder's zoo.json records; CheckpointError for one that the table lacks."""
    try:
        return {name: entry.stored_as(layouts.get(name)) for name, entry in entries.items()}
    except ValueError as error:
        raise CheckpointError(f"{Path(folder) / ABOUT}: {error}; was it written by another zoo?") from None


def published_dtypes(folder: str | Path) -> dict[str, torch.dtype]:
    """Dtypes of published tensors, by name, that differ from those of zoo's tensors that they are parts of."""
    named = read_about(folder).get("dtypes") or {}
    return {name: DTYPES[dtype] for name, dtype in named.items()}


def native(bridge: Bridge) -> Bridge:
    """The table of zoo's own weights: names stand for themselves, tensors that zoo carries have a prefix."""
    rules = tuple(
        replace(
            rule,
            layouts=(Layout((rule.zoo,)),),
            tied_to=rule.tied_to and bridge.zoo_name(rule.tied_to),
            keeps_layout=False,
        )
        for rule in bridge.rules
    )
    return Bridge(
        name=f"{bridge.name} in zoo's names",
        rules=rules,
        pass_through=(f"{PASS_THROUGH}{{rest}}",),
        optional=tuple(_zoo_part(bridge, pattern) for pattern in bridge.optional),
    )


def _zoo_part(bridge: Bridge, pattern: str) -> str:
    """Zoo's pattern for a part that Hugging Face names `<prefix>{rest}`."""
    prefix = pattern.removesuffix("{rest}")
    names = [rule.zoo.replace(".", "/") for rule in bridge.rules if rule.layouts[0].patterns[0].startswith(prefix)]
    return os.path.commonpath(names).replace("/", ".") + ".{rest}"
