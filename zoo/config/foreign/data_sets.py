"""Data sets of other trainers' files as entries of data.train."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from zoo.config.layers.layer import ROWS_FILE
from zoo.config.layers.reader import UnreadableError, read_text, read_yaml
from zoo.config.locate import is_hub_id
from zoo.files import expanded
from zoo.types import JsonMapping, JsonObject

# Names of forms of rows: zoo's format, "" where it is recognised by the rows' keys.
FORMS = {
    "alpaca": "alpaca", "sharegpt": "conversations", "chat_template": "", "openai": "", "chatml": "", "chat": "", "completion": "text", "pretraining": "text",
    "pretrain": "text", "instruction": "alpaca", "preference": "preference", "ranking": "preference", "dpo": "preference", "rm": "preference",
}  # fmt: skip
# Keys of axolotl that name columns -> zoo's name of the column.
_COLUMNS = {
    "field_messages": "messages", "field_chosen": "chosen", "field_rejected": "rejected", "field": "text", "field_instruction": "instruction",
    "field_input": "input", "field_output": "output", "field_system": "system", "field_tools": "tools",
}  # fmt: skip
_TURNS = ("messages", "conversations", "conversation")  # names that rows' formats know
_SAMPLED = re.compile(r"#\d+$")  # ms-swift: so many rows of it


class Sets(NamedTuple):
    """What a file's data sets come to."""

    entries: list[str | JsonObject]  # of data.train
    unknown: list[str]  # names that say nothing of where their rows are
    unread: list[str]  # what is said of sets and has no counterpart


def read_sets(sources: object, folder: object = None) -> Sets:
    """Entries for what a file says of its data sets.

    Args:
        sources: a text, with commas between several; a mapping; or a list of these.
        folder: where a `dataset_info.json` tells which files the names stand for; default: data.
    """
    sets = Sets([], [], [])
    listed = _listed(str(folder or "data"))
    for source in sources if isinstance(sources, list) else [sources]:
        parts = source.replace(",", " ").split() if isinstance(source, str) else [source]
        for part in parts:
            name = part.get("path") or part.get("name") if isinstance(part, Mapping) else part
            if isinstance(part, Mapping):
                entry, unread = _entry_from_mapping(part)
            else:
                entry, unread = _entry_from_name(str(part), listed), []
            if entry is None:
                sets.unknown.append(str(name))
            else:
                sets.entries.append(entry)
            sampled = [str(part)] if _SAMPLED.search(str(part)) and isinstance(part, str) else []
            sets.unread.extend([*sampled, *unread])
    return sets


def _entry_from_name(name: str, listed: JsonMapping) -> str | JsonObject | None:
    name = _SAMPLED.sub("", name)
    name = name.removeprefix("hf::").removeprefix("ms::").removeprefix("HF::").removeprefix("MS::")
    if ROWS_FILE.fullmatch(name) or expanded(name).exists():
        return name
    if name in listed:
        return listed[name]
    name, _, subset = name.partition(":")  # ms-swift: a configuration of it
    if not is_hub_id(name):
        return None
    return {"hub": name, **({"name": subset} if subset else {})}


def _entry_from_mapping(mapping: JsonMapping) -> tuple[str | JsonObject | None, list[str]]:
    """The entry of a mapping of axolotl's, and what of it is not read."""
    left = {key: value for key, value in mapping.items() if value not in (None, False, "", [], {})}
    name = left.pop("path", None) or left.get("data_files") or left.get("name")
    files = left.pop("data_files", None)
    name = files if name in ("json", "csv", "parquet", "text") and isinstance(files, str) else name
    entry = _entry_from_name(name, {}) if isinstance(name, str) else None
    if entry is None:
        return None, []
    entry = dict(entry) if isinstance(entry, dict) else {"path": entry}
    kind, split = str(left.pop("type", "")).partition(".")[0], str(left.pop("split", "") or "")
    plain_split, bracket, _ = split.partition("[")  # a share of it
    columns = {zoo_name: left.pop(key) for key, zoo_name in _COLUMNS.items() if isinstance(left.get(key), str)}
    columns = {zoo_name: column for zoo_name, column in columns.items() if column not in (zoo_name, *_TURNS)}
    more = {"name": left.pop("name", None), "split": plain_split, "format": FORMS.get(kind, ""), "columns": columns}
    entry |= {key: value for key, value in more.items() if value}
    for key in ("message_property_mappings", "roles", "chat_template", "ds_type", "field"):  # rows say it themselves
        left.pop(key, None)
    unread = [f"{name}: {key}" for key in left] + ([f"{name}: split {split}"] if bracket else [])
    return (entry["path"] if set(entry) == {"path"} else entry), unread


def _listed(folder: str) -> JsonObject:
    """The entries that names of a `dataset_info.json` stand for."""
    try:
        known = read_yaml(read_text(Path(expanded(folder)) / "dataset_info.json").replace("\t", " "))
    except (OSError, UnreadableError):
        return {}
    entries: JsonObject = {}
    for name, about in (known if isinstance(known, dict) else {}).items():
        if not isinstance(about, dict):
            continue
        form = "preference" if about.get("ranking") is True else FORMS.get(str(about.get("formatting") or "alpaca"), "")
        names_roles = "tags" in about or "messages" in (about.get("columns") or {})  # rows are recognised by their keys
        more = {"format": form} if form and not names_roles else {}
        if isinstance(about.get("file_name"), str):
            path = f"{folder}/{about['file_name']}"
            entries[name] = {"path": path, **more} if more else path
        elif isinstance(about.get("hf_hub_url"), str):
            entries[name] = {"hub": about["hf_hub_url"], **more}
    return entries
