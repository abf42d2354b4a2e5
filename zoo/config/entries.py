"""Entries of `data.train` and `data.eval`: a path, a bundled set, or a mapping that says more of the rows' source."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

from zoo.config.layers.foreign import foreign_entry_key, foreign_format
from zoo.config.layers.keys import number, outside, shown_value
from zoo.errors import ConfigError, printable
from zoo.files import expanded
from zoo.types import JsonMapping, JsonObject

MEDIA_KEYS = ("video_fps", "max_frames", "min_pixels", "max_pixels", "video_max_pixels")
AUTO = "auto"  # an entry of data.eval: the held-out rows of data.train
BUNDLED = {"digits": ("train", "heldout")}  # set -> splits; package zoo.data.<set>
FORMS = (
    "messages", "conversations", "text", "alpaca", "query_response", "prompt_completion", "question_answer", "preference", "retrieval",
    "cord_v2", "llava_instruct", "captions", "cauldron",
    "transcripts", "classes",
)  # fmt: skip
ASKED = ("captions", "transcripts", "classes")  # formats of rows without a question
OWN_FORM = re.compile(r"([^:]+\.py|\w+(\.\w+)*):\w+(\.\w+)*")  # module:function, file.py:function


@dataclass(frozen=True)
class PixelLimits:
    """How large images and videos may be; None: what the processor has.

    Attributes:
        least: data.min_pixels.
        most: data.max_pixels.
        video_most: data.video_max_pixels, counted as the family's video processor does.
    """

    least: int | None = None
    most: int | None = None
    video_most: int | None = None


@dataclass(frozen=True)
class MediaLimits:
    """How frames are taken of videos, and how large media may be.

    Attributes:
        video_fps: frames taken per second of video.
        max_frames: most frames taken of one video.
        pixels: how large images and videos may be.
        own: keys that the entry of the rows has itself; the others are of the recipe's data.
    """

    video_fps: float
    max_frames: int
    pixels: PixelLimits = PixelLimits()
    own: tuple[str, ...] = ()

    @classmethod
    def from_data(cls, data: object, entry: DataEntry | None = None) -> MediaLimits:
        """Those of a recipe's data, or of one of its entries.

        Args:
            data: a DataConfig.
            entry: its own values stand before the recipe's.
        """
        entry_limits = {name: value for name in MEDIA_KEYS if (value := getattr(entry, name, None)) is not None}
        fps, frames, least, most, video_most = (entry_limits.get(name, getattr(data, name)) for name in MEDIA_KEYS)
        return cls(fps, frames, PixelLimits(least, most, video_most), tuple(entry_limits))

    def key(self, name: str) -> str:
        """What a message calls the setting that holds for the rows: data.max_pixels, say."""
        return f"{name} of their entry" if name in self.own else f"data.{name}"


@dataclass(frozen=True, kw_only=True)
class DataEntry:
    """Where rows come from, and how many of them."""

    path: str | None = None  # a file, a folder, a bundled set, or several tars (shard-{000..015}.tar)
    hub: str | None = None  # a data set's id at the Hugging Face hub, in the place of path
    name: str | None = None  # which configuration of the hub's set
    revision: str | None = None  # branch, tag or commit of the hub's set
    split: str | None = None  # which split; not needed where there is one
    format: str | None = None  # of the rows, or module:function for one of your own; default: recognised by their keys
    # zoo's name of a column -> its name in the source, such as {messages: chat}; null: nothing is read as it
    columns: dict[str, str | None] | None = None
    prompt: str | None = None  # the question of rows that have none: formats captions, transcripts, classes
    classes: list[str] | None = None  # names of the classes that rows of the format classes give by numbers, from 0
    root: str | None = None  # folder of the media; default: data.root, or the file's folder
    # share of the rows drawn, against the other entries' weights
    weight: float | None = number(None, above=0, most=1e9)
    epochs: float | None = number(None, above=0, most=1e6)  # passes over these rows in one epoch of the run
    # share of the rows kept for evaluation: training gets the others
    held_out: float | None = number(None, above=0, below=1)
    seed: int = number(0, 0, 2**32 - 1)  # which rows those are
    kinds: list[str] | None = None  # rows of these kinds alone, by their key `kind`
    literal_tags: bool | None = None  # as data.literal_tags, for these rows
    stream: bool = False  # read in order, without knowing how many rows there are
    video_fps: float | None = number(None, above=0, most=1000)  # as data.video_fps, for these rows
    max_frames: int | None = number(None, 1, 10**6)  # as data.max_frames
    min_pixels: int | None = number(None, 1, 10**9)  # as data.min_pixels
    max_pixels: int | None = number(None, 1, 10**9)  # as data.max_pixels
    video_max_pixels: int | None = number(None, 1, 10**10)  # as data.video_max_pixels
    rows: Any = None  # rows as objects, for programs: a list of dicts, or a datasets.Dataset

    def __str__(self) -> str:
        """What messages and logs call it."""
        name = self.path or self.hub or "rows"
        return f"{name}[{self.split}]" if self.split else name

    @property
    def selected(self) -> str:
        """The same with the kinds of rows that are taken."""
        return f"{self} ({', '.join(self.kinds)})" if self.kinds else str(self)


_NAMES = {item.name: str(item.type) for item in fields(DataEntry)}  # its keys and their types


def parse_entry(value: object, key: str) -> DataEntry:
    """An entry as it was written.

    Args:
        value: a path, a mapping of DataEntry's fields, a DataEntry, or rows as objects.
        key: data.train or data.eval, for messages.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or keys that do not go together.
    """
    if isinstance(value, DataEntry):
        _check(value, key)
        return value
    if isinstance(value, str):
        return DataEntry(path=value)
    if not isinstance(value, Mapping) and hasattr(value, "__iter__") and not isinstance(value, bytes):
        # a row that is none among others is a bad row, read when its turn comes
        if isinstance(value, list | tuple) and value and not any(isinstance(row, Mapping) for row in value):
            raise ConfigError(f"{key}: row 1 is a {type(value[0]).__name__}; a dict is wanted")
        return DataEntry(rows=value)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}: {shown_value(value)} is no entry; a path or {{path: ..., format: ...}} is wanted")
    if unknown := unknown_keys(value):
        raise ConfigError(f"{key}: {'; '.join(unknown[:10])}")
    for name, held in value.items():
        _check_type(name, held, key)
    entry = DataEntry(**value)
    _check(entry, key)
    return entry


def unknown_keys(names: Iterable[object]) -> list[str]:
    """What is said of each of these names that is no key of an entry."""
    said = []
    for name in map(str, (name for name in names if name not in _NAMES)):
        near = get_close_matches(name, _NAMES, n=1, cutoff=0.5)
        hint = f"nearest: {near[0]}" if near else f"known: {', '.join(_NAMES)}"
        if (key := foreign_entry_key(name)) is not None:
            hint = f"zoo's is {key}"
        said.append(f"{printable(name, 200)}: no such key of an entry; {hint}")
    return said


def is_bundled(entry: str | DataEntry) -> bool:
    """Whether an entry, or its path, names a bundled set; a file of that name comes first."""
    path = entry.path if isinstance(entry, DataEntry) else entry
    name, _, split = (path or "").partition(":")
    return split in BUNDLED.get(name, ()) and not os.path.isfile(expanded(path or ""))


def only_bundled(train: list[DataEntry]) -> bool:
    """Whether nothing but bundled sets is trained on."""
    return all(map(is_bundled, train))


def held_out_entries(train: list[DataEntry]) -> list[DataEntry]:
    """The entries that `auto` in data.eval stands for: the held-out rows of these of data.train.

    They are those of entries with `held_out`, and where nothing but bundled sets is trained on, their held-out split.
    """
    entries: list[DataEntry] = []
    for entry in train if only_bundled(train) else [entry for entry in train if not is_bundled(entry)]:
        entry = replace(entry, weight=None, epochs=None)
        if entry.held_out is None and is_bundled(entry):
            entry = replace(entry, path=f"{str(entry.path).partition(':')[0]}:heldout")
        elif entry.held_out is None:
            continue
        entries += [] if entry in entries else [entry]
    return entries


def entries_of(data: object, key: str) -> list[object]:
    """The entries that a program has given: paths and mappings as they are, objects as entries with `rows`.

    Args:
        data: an entry, or a list of these; or rows: a list of dicts, a datasets.Dataset, any iterable of dicts.
        key: data.train or data.eval, for messages.

    Raises:
        ConfigError: an entry that is none.
    """
    if isinstance(data, str | os.PathLike):
        return [str(data)]
    if isinstance(data, Mapping):  # a row stands in a list
        return [data]
    if isinstance(data, list | tuple) and not (data and all(map(is_row, data))):
        entries = []
        for item in data:
            entry = str(item) if isinstance(item, os.PathLike) else item
            plain = isinstance(entry, str) or (isinstance(entry, Mapping) and entry.get("rows") is None)
            entries.append(entry if plain else parse_entry(entry, key))
        return entries
    return entries_of([data if not isinstance(data, tuple) else list(data)], key)


def is_row(value: object) -> bool:
    """Whether a mapping is a row, rather than an entry."""
    return isinstance(value, Mapping) and not set(value) <= _NAMES.keys()


def has_objects(entries: Iterable[object]) -> bool:
    """Whether some of a recipe's entries are rows as objects."""
    return any(isinstance(entry, DataEntry) and entry.rows is not None for entry in entries)


def split_objects(changes: JsonMapping) -> tuple[JsonObject, dict[str, list[object]]]:
    """Changes of a recipe without those of data.train and data.eval that are objects, and these as entries by name."""
    plain, objects = dict(changes), {}
    for name in ("train", "eval"):
        section: Any = plain.get("data")
        if isinstance(section, Mapping):
            plain["data"] = section = dict(section)
        for held, key in ((plain, f"data.{name}"), (section, name)):
            value = held.get(key) if isinstance(held, dict) else getattr(held, key, None)
            if not (entries := object_entries(value, f"data.{name}")):
                continue
            objects[name] = entries
            if isinstance(held, dict):
                del held[key]
            else:  # a DataConfig
                plain["data"] = replace(held, **{name: []})
    return plain, objects


def object_entries(value: object, key: str) -> list[object]:
    """The entries that a value stands for, where some of them are rows as objects; else none."""
    if value is None or isinstance(value, str):
        return []
    entries = entries_of(value, key)
    return entries if has_objects(entries) else []


_WANTED: dict[str, tuple[type | tuple[type, ...], str]] = {
    "str": (str, "a text"),
    "float": ((int, float), "a number"),
    "int": (int, "a whole number"),
    "bool": (bool, "true or false"),
    "dict[str, str | None]": (Mapping, "a mapping of zoo's names to the source's"),
    "list[str]": ((list, tuple), "a list of texts"),
    "Any": (object, ""),
}


def _check_type(name: str, value: object, key: str) -> None:
    plain = _NAMES[name].removesuffix(" | None")
    kind, wanted_type = _WANTED[plain]
    if value is None and "None" in _NAMES[name]:
        return
    if not isinstance(value, kind) or (isinstance(value, bool) and plain in ("float", "int")):
        raise ConfigError(f"{key}: {name}={shown_value(value)}: wanted {wanted_type}")


def _check(entry: DataEntry, key: str) -> None:
    sources = [name for name in ("path", "hub", "rows") if getattr(entry, name) is not None]
    if len(sources) != 1:
        seen = " and ".join(sources) or "neither"
        raise ConfigError(f"{key}: an entry has {seen}; exactly one of path and hub is wanted")
    for name, column in (entry.columns or {}).items():
        if not isinstance(name, str) or not (column is None or (isinstance(column, str) and column)):
            raise ConfigError(
                f"{key}: columns of {entry}: {shown_value(name)}: {shown_value(column)}: wanted two names, or null for a column that is not read"
            )
    _check_format(entry.format, key)
    for name, value, bounds in outside(entry):
        raise ConfigError(f"{key}: {name}={shown_value(value)} of {entry}: wanted a number {bounds}")
    if entry.min_pixels is not None and entry.max_pixels is not None and entry.min_pixels > entry.max_pixels:
        raise ConfigError(
            f"{key}: min_pixels={entry.min_pixels} of {entry} is above max_pixels={entry.max_pixels}; give a lower min_pixels"
        )
    kinds = entry.kinds
    if kinds is not None and not (kinds and all(isinstance(kind, str) for kind in kinds)):
        raise ConfigError(f"{key}: kinds={list(kinds)} of {entry}: wanted a list of kinds, such as [image, audio]")
    if kinds is not None and entry.stream:
        raise ConfigError(f"{key}: kinds of {entry}: a stream gives all its rows; leave out kinds or stream")
    if entry.prompt is not None and entry.format not in ASKED:
        raise ConfigError(
            f"{key}: prompt of {entry}: it is the question of rows of the formats {', '.join(ASKED)}; name one of these, or leave it out"
        )
    if entry.classes is not None and entry.format != "classes":
        raise ConfigError(f"{key}: classes of {entry}: they are those of format=classes; name it, or leave them out")
    if entry.stream and entry.epochs is not None:
        raise ConfigError(f"{key}: epochs of {entry}: a stream's rows are not counted; give it a weight")


def _check_format(name: str | None, key: str) -> None:
    if name is None or name in FORMS or OWN_FORM.fullmatch(name):
        return
    if name in {point.name for point in entry_points(group="zoo.formats")}:
        return
    near = get_close_matches(name, FORMS, n=1, cutoff=0.4)
    hint = f"nearest: {near[0]}; " if near else ""
    if (form := foreign_format(name)) is not None:
        hint = f"zoo's is {form} (without format: it is recognised by the rows' keys); "
    raise ConfigError(
        f"{key}: format={name}: no such format; {hint}there are {', '.join(FORMS)}, and module:function for one of your own"
    )


def check_entries(train: Sequence[object], evals: Sequence[object]) -> None:
    """What must agree between the entries of a recipe.

    Raises:
        ConfigError: an entry that is none; weights for some entries only; rows held out for evaluation and trained on.
    """
    listed = [value for value in evals if value != AUTO]
    both = {"data.train": train, "data.eval": listed}
    entries = {key: [parse_entry(value, key) for value in values] for key, values in both.items()}
    for key, parsed in entries.items():
        some = [entry.weight is not None for entry in parsed]
        if any(some) and not all(some):
            lacking = next(entry for entry in parsed if entry.weight is None)
            raise ConfigError(f"{key}: {lacking} has no weight, and others have; give all a weight or none")
        if len(parsed) > 1 and not all(some) and any(entry.stream for entry in parsed):
            raise ConfigError(f"{key}: a stream beside others needs weights; give each entry a weight")
    for entry in entries["data.eval"]:
        if entry.weight is not None or entry.epochs is not None:
            raise ConfigError(f"data.eval: weight and epochs of {entry}: every row is evaluated once; leave them out")
        if entry.held_out is None:
            continue
        for other in entries["data.train"]:
            same = (entry.path, entry.hub, entry.split) == (other.path, other.hub, other.split)
            if same and (entry.held_out, entry.seed) != (other.held_out, other.seed):
                raise ConfigError(
                    f"data.eval holds out {entry.held_out:g} of {entry} (seed {entry.seed}), data.train "
                    f"{other.held_out or 0:g} (seed {other.seed}): rows would be trained on and evaluated; give both the same"
                )
