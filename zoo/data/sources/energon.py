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
from zoo.data.errors import RowError
from zoo.data.sources.references import shown
from zoo.errors import UserError, printable

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
    kind = about.get("sample_type", about)
    name = str(kind.get("__class__", "")) if isinstance(kind, dict) else ""
    fields = about.get("field_map")
    if name.startswith("Crude"):
        return EnergonSet(tars, left_out, None, {})
    found = next(((form, columns) for word, form, columns in CLASSES if word in name), None)
    if found is None or not isinstance(fields, dict):
        what = "a sample_loader, which is code that zoo does not run" if fields is None else f"the class {shown(name)}"
        raise UserError(
            f"{key}: {META}/dataset.yaml has {what}; name how its samples are read: {{path: ..., format: module:function}}"
        )
    form, columns = found
    return EnergonSet(
        tars, left_out, form, {columns[field]: str(place) for field, place in fields.items() if field in columns}
    )


def _tars(folder: Path, split: str, key: str) -> tuple[list[Path], frozenset[str]]:
    about = _read(folder, "split.yaml", key)
    parts = about.get("split_parts")
    if not isinstance(parts, dict) or not isinstance(parts.get(split), list) or not parts[split]:
        there = ", ".join(str(name) for name, tars in parts.items() if tars) if isinstance(parts, dict) else ""
        raise UserError(f"{key}: no tars of a split {split} in {META}/split.yaml; splits: {there or 'none'}")
    left_out = frozenset(map(str, about.get("exclude") or []))
    names = [name for one in parts[split] for name in _spread(str(one), key) if name not in left_out]
    for name in names:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
            text = f"{key}: {META}/split.yaml names {printable(name, 200)}, which is no file of that folder"
            raise UserError(text)
    return [folder / name for name in names], left_out


def _spread(name: str, key: str) -> list[str]:
    """The names that one with {000..015} stands for."""
    span = SPAN.search(name)
    if span is None:
        return [name]
    first, last = span.groups()
    if len(last) > 9 or int(last) - int(first) >= MOST_TARS:
        raise UserError(f"{key}: {META}/split.yaml names over {MOST_TARS} tars with {printable(name, 200)}")
    return [SPAN.sub(f"{n:0{len(first)}}", name, count=1) for n in range(int(first), int(last) + 1)]


def _read(folder: Path, name: str, key: str) -> dict[str, Any]:
    path = folder / META / name
    try:
        found = read_yaml(read_text(path))
    except (OSError, UnreadableError) as error:
        raise UserError(f"{key}: {path} can't be read: {printable(str(error), 200)}") from error
    if not isinstance(found, dict):
        raise UserError(f"{key}: {path} is no mapping; `energon prepare` writes it anew")
    return found


def field_of(members: Mapping[str, Any], place: str, source: str) -> Any:
    """What stands at a place of a sample, such as `json[0][value]`; None where the sample has no such member.

    Args:
        members: extension -> what the sample's member holds.
        place: members with `;` or `,` between them, the first there is counts.
        source: where the sample stands, for errors.

    Raises:
        RowError: the member has nothing at that place ("bad_row").
    """
    for one in re.split(r"[;,]", place):
        name = next((name for name in sorted(members, key=len, reverse=True) if _begins(one.strip(), name)), None)
        if name is None:
            continue
        value = members[name]
        for index, attribute in STEP.findall(one.strip()[len(name) :]):
            step = index or attribute
            try:
                value = value[int(step)] if isinstance(value, list) else value[step]
            except (LookupError, TypeError, ValueError) as error:
                text = f"the sample has nothing at {shown(place)}, where dataset.yaml's field_map looks."
                raise RowError(source, "bad_row", text) from error
        return value
    return None


def _begins(place: str, name: str) -> bool:
    rest = place.removeprefix(name)
    return place.startswith(name) and (not rest or rest[0] == "[" or rest[0] == ".")
