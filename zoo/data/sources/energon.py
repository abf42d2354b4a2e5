"""Data sets as Megatron-Energon prepares them: tars beside a folder `.nv-meta`, which names their splits and fields.

`split.yaml` says which tars are of which split, and what to leave out; `dataset.yaml` names the sample's class and which
member of a sample each field is: `image: jpg`, `context: json[0][value]`. Code that they name (`sample_loader`) is not run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.config.layers.reader import UnreadableError, read_text, read_yaml
from zoo.data.errors import bad_row
from zoo.data.sources.references import shown
from zoo.errors import UserError, printable
from zoo.types import JsonObject

META = ".nv-meta"
STEP = re.compile(r"\[([^\[\]]+)\]|\.(\w+)")  # [0], [value], .value
SPAN = re.compile(r"\{(\d+)\.\.(\d+)\}")
MOST_TARS = 100_000
# A word of the class's name -> format, and Energon's field -> zoo's column.
CLASSES: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("ChatML", "conversations", {"conversation": "conversations", "imgs": "images", "videos": "videos", "audio": "audios", "audios": "audios"}),
    ("VQA", "question_answer", {"image": "images", "context": "question", "answers": "answers"}),
    ("Captioning", "captions", {"image": "image", "caption": "caption"}),
)  # fmt: skip


@dataclass(frozen=True)
class EnergonSet:
    """What `.nv-meta` says of a data set.

    Attributes:
        tars: those of the split.
        left_out: "tar/sample" of samples that are left out.
        form: the format of the rows; None: not known.
        fields: zoo's column -> member of a sample, as `json[0][value]`; {}: each sample's own .json names them.
    """

    tars: list[Path]
    left_out: frozenset[str]
    form: str | None
    fields: Mapping[str, str]


def is_energon(folder: Path) -> bool:
    """Whether Energon prepared a folder."""
    return os.path.isdir(folder / META)  # False too for a name that can be none


def read_energon(folder: Path, split: str | None, named: str | None, key: str) -> EnergonSet:
    """The tars and fields of a data set.

    Args:
        folder: that holds `.nv-meta`.
        split: which split; None: train.
        named: the format that the entry names, which holds whatever dataset.yaml says; None where it names none.
        key: the entry, for messages.

    Raises:
        UserError: a file of `.nv-meta` that can't be read, no such split, tars out of the folder, or samples that only
            code can read.
    """
    tars, left_out = _tars(folder, split or "train", key)
    if named is not None:
        return EnergonSet(tars, left_out, named, {})
    about = _read(folder, "dataset.yaml", key)
    sample_type = about.get("sample_type", about)
    name = str(sample_type.get("__class__", "")) if isinstance(sample_type, dict) else ""
    fields = about.get("field_map")
    if name.startswith("Crude"):
        return EnergonSet(tars, left_out, None, {})
    form, columns = next(((form, columns) for word, form, columns in CLASSES if word in name), (None, {}))
    if form is None or not isinstance(fields, dict):
        seen = "a sample_loader, which is code that zoo does not run" if fields is None else f"the class {shown(name)}"
        hint = "name how its samples are read: {path: ..., format: module:function}"
        raise UserError(f"{key}: {META}/dataset.yaml has {seen}; {hint}")
    members = {columns[field]: str(path) for field, path in fields.items() if field in columns}
    return EnergonSet(tars, left_out, form, members)


def _tars(folder: Path, split: str, key: str) -> tuple[list[Path], frozenset[str]]:
    about = _read(folder, "split.yaml", key)
    splits = about.get("split_parts")
    if not isinstance(splits, dict) or not isinstance(splits.get(split), list) or not splits[split]:
        known = ", ".join(str(name) for name, tars in splits.items() if tars) if isinstance(splits, dict) else ""
        raise UserError(f"{key}: no tars of a split {split} in {META}/split.yaml; splits: {known or 'none'}")
    left_out = frozenset(map(str, about.get("exclude") or []))
    names = []
    for pattern in map(str, splits[split]):
        too_many = f"{key}: {META}/split.yaml names over {MOST_TARS} tars with {printable(pattern, 200)}"
        names += [name for name in spread_braces(pattern, too_many) if name not in left_out]
    for name in names:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
            problem = f"{key}: {META}/split.yaml names {printable(name, 200)}"
            raise UserError(f"{problem}, which is no file of that folder")
    return [folder / name for name in names], left_out


def spread_braces(name: str, too_many: str) -> list[str]:
    """The names that one with {000..015} stands for; UserError that says `too_many` for over MOST_TARS."""
    span = SPAN.search(name)
    if span is None:
        return [name]
    first, last = span.groups()
    if len(last) > 9 or int(last) - int(first) >= MOST_TARS:
        raise UserError(too_many)
    return [SPAN.sub(f"{n:0{len(first)}}", name, count=1) for n in range(int(first), int(last) + 1)]


def _read(folder: Path, name: str, key: str) -> JsonObject:
    path = folder / META / name
    try:
        content = read_yaml(read_text(path))
    except (OSError, UnreadableError) as error:
        raise UserError(f"{key}: {path} can't be read: {printable(str(error), 200)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{key}: {path} is no mapping; `energon prepare` writes it anew")
    return content


def field_of(members: Mapping[str, object], path: str) -> object:
    """The value at a path within a sample, such as `json[0][value]`; None where the sample has no such member.

    Args:
        members: extension -> content of the sample's member.
        path: members with `;` or `,` between them, of which the first that is there counts.

    Raises:
        RowError: the member has nothing at that path ("bad_row").
    """
    for option in map(str.strip, re.split(r"[;,]", path)):
        fitting = [name for name in members if option.startswith(name) and option[len(name) :][:1] in ("", "[", ".")]
        if not fitting:
            continue
        name = max(fitting, key=len)
        value: Any = members[name]
        for index, attribute in STEP.findall(option[len(name) :]):
            step = index or attribute
            try:
                value = value[int(step)] if isinstance(value, list) else value[step]
            except (LookupError, TypeError, ValueError) as error:
                text = f"the sample has nothing at {shown(path)}, where dataset.yaml's field_map looks."
                raise bad_row(text) from error
        return value
    return None
