"""Data sets of other trainers' files as entries of data.train."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.config.layers.reader import UnreadableError, read_text, read_yaml
from zoo.config.locate import is_hub_id
from zoo.files import expanded

# Names of forms of rows: zoo's format, "" where it is recognised by the rows' keys.
FORMS = {
    "alpaca": "alpaca", "sharegpt": "conversations", "chat_template": "", "openai": "", "chatml": "", "chat": "", "completion": "text", "pretraining": "text",
    "pretrain": "text", "instruction": "alpaca", "preference": "preference", "ranking": "preference", "dpo": "preference", "rm": "preference",
}  # fmt: skip
_FILE = re.compile(r".*\.(jsonl?|csv|tsv|parquet|txt|tar|arrow)", re.IGNORECASE)
_SAMPLED = re.compile(r"#\d+$")  # ms-swift: so many rows of it


def entries(given: Any, folder: Any = None) -> tuple[list[Any], list[str]]:
    """Entries of data.train for what a file says of its data sets, and the names that say nothing of where their rows are.

    Args:
        given: a text, with commas between several; a mapping; or a list of these.
        folder: where a `dataset_info.json` tells which files the names stand for; default: data.
    """
    ones = given if isinstance(given, list) else [given]
    ones = [
        part for one in ones for part in (one.replace(",", " ").split() if isinstance(one, str) else [one])
    ]
    listed = _listed(str(folder or "data"))
    found: list[Any] = []
    unknown: list[str] = []
    for one in ones:
        entry = _of_mapping(one) if isinstance(one, Mapping) else _of_name(str(one), listed)
        if entry is None:
            unknown.append(str(one.get("path", one)) if isinstance(one, Mapping) else str(one))
        else:
            found.append(entry)
    return found, unknown


def samples(given: Any) -> list[str]:
    """What is said of how many rows of a set are taken, as `name#500`."""
    return [str(one) for one in (given if isinstance(given, list) else [given]) if _SAMPLED.search(str(one))]


def _of_name(name: str, listed: Mapping[str, Any]) -> Any:
    name = _SAMPLED.sub("", name).removeprefix("hf::").removeprefix("ms::")
    if _FILE.fullmatch(name) or expanded(name).exists():
        return name
    if name in listed:
        return listed[name]
    return {"hub": name} if is_hub_id(name) else None


def _of_mapping(one: Mapping[str, Any]) -> Any:
    path, kind = one.get("path") or one.get("data_files") or one.get("name"), one.get("type")
    entry = _of_name(path, {}) if isinstance(path, str) else None
    if entry is None:
        return None
    more = {"split": one.get("split"), "format": FORMS.get(kind, "") if isinstance(kind, str) else None}
    more = {name: value for name, value in more.items() if value}
    return entry if not more else {**(entry if isinstance(entry, dict) else {"path": entry}), **more}


def _listed(folder: str) -> dict[str, Any]:
    """The entries that names of a `dataset_info.json` stand for."""
    try:
        known = read_yaml(read_text(Path(expanded(folder)) / "dataset_info.json").replace("\t", " "))
    except (OSError, UnreadableError):
        return {}
    found: dict[str, Any] = {}
    for name, about in (known if isinstance(known, dict) else {}).items():
        if not isinstance(about, dict):
            continue
        form = (
            "preference"
            if about.get("ranking") is True
            else FORMS.get(str(about.get("formatting") or "alpaca"), "")
        )
        more = {"format": form} if form and not _names_roles(about) else {}
        if isinstance(about.get("file_name"), str):
            path = f"{folder}/{about['file_name']}"
            found[name] = {"path": path, **more} if more else path
        elif isinstance(about.get("hf_hub_url"), str):
            found[name] = {"hub": about["hf_hub_url"], **more}
    return found


def _names_roles(about: Mapping[str, Any]) -> bool:
    """Whether a set of conversations names its roles itself: its rows are recognised by their keys."""
    return "tags" in about or "messages" in (about.get("columns") or {})
