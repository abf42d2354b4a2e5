"""Hugging Face data sets: folders of `save_to_disk`, parquet files, and ids at the hub, whole or as streams."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zoo.config.entries import DataEntry
from zoo.config.hub import asking_the_hub
from zoo.data.memory_limits import memory_limited
from zoo.errors import UserError, printable
from zoo.files import expanded, why_no_file
from zoo.records import Check, are_texts, is_text, list_of, read_record

_SAVED: dict[str, Check] = {"splits": are_texts, "_data_files": list_of({"filename": is_text}, ("filename",))}
PARQUET_MB = 8192  # MiB that the rank may take to unpack parquet files; a row group is held whole


def load_local(entry: DataEntry, kind: str, key: str) -> Any:
    """The datasets.Dataset of a folder of `save_to_disk` (kind "disk") or of parquet files ("parquet").

    Raises:
        UserError: it can't be read, or no such split.
    """
    import datasets

    assert entry.path is not None
    path = expanded(entry.path)
    if kind == "disk":
        _check_names(path, f"{key}={entry}")
        return _split(_tried(key, entry, lambda: datasets.load_from_disk(str(path))), entry, key)
    if entry.split is not None and os.path.isfile(path):
        raise UserError(f"{key}={entry.path}: split={entry.split}: a parquet file has no splits; leave it out.")
    files = parquet_files(path, entry, key)
    return _split(_tried(key, entry, lambda: _unpacked(files)), entry, key)


def _unpacked(files: dict[str, list[str]]) -> Any:
    """The data set of parquet files: of a kilobyte that stands for gigabytes, no more than PARQUET_MB are held."""
    import datasets

    builder = datasets.load_dataset_builder("parquet", data_files=files)
    with memory_limited(PARQUET_MB):
        builder.download_and_prepare()
    return builder.as_dataset()  # mapped from disk, and no part of the limit


def _check_names(folder: Path, given: str) -> None:
    """That the files which a folder of `save_to_disk` names lie in it; UserError where not."""
    hint = f"names of files of the same folder are wanted, as save_to_disk writes them ({given})"
    for file in (folder / "dataset_dict.json", *folder.glob("state.json"), *folder.glob("*/state.json")):
        about = read_record(file, _SAVED, hint=hint) if file.exists() else {}
        names = [*about.get("splits", []), *(data["filename"] for data in about.get("_data_files", []))]
        for name in names:
            if name in ("", ".", "..") or name != Path(name).name:
                text = f"{given}: {file} names {printable(name, 200)}; files of the same folder are wanted"
                raise UserError(text)


def load_hub(entry: DataEntry, key: str) -> Any:
    """The data set of a hub id, a datasets.IterableDataset under `stream`.

    Raises:
        UserError: it can't be loaded, or no such split.
    """
    return _split(_load(str(entry.hub), entry, key, name=entry.name, revision=entry.revision), entry, key)


def load_parquet_stream(entry: DataEntry, key: str) -> Any:
    """The datasets.IterableDataset of parquet files."""
    path = expanded(str(entry.path))
    return _split(_load("parquet", entry, key, data_files=parquet_files(path, entry, key)), entry, key)


def parquet_files(path: Path, entry: DataEntry, key: str) -> dict[str, list[str]]:
    """Split -> parquet files that have rows: `train-00000-of-00002.parquet` is of `train`; others are of `train` too.

    Raises:
        UserError: no such files, one that is none, or no rows in all of them.
    """
    named = _named_parquet_files(path, entry, key)
    found = {split: [file for file in files if _parquet_rows(file, key)] for split, files in named.items()}
    if not any(found.values()):
        raise UserError(
            f"{key}={printable(str(entry), 300)} has no rows; a parquet file with a row for each sample is wanted."
        )
    return {split: files for split, files in found.items() if files}


def _parquet_rows(file: str, key: str) -> int:
    """Rows of a parquet file, by its footer."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    try:
        about = read_metadata(file)
    except (ArrowException, OSError, MemoryError) as error:
        raise UserError(
            f"{key}: {printable(file, 300)} is no parquet file that can be read: {printable(str(error), 300)}."
        ) from error
    return int(about.num_rows) if about.num_columns else 0


def _named_parquet_files(path: Path, entry: DataEntry, key: str) -> dict[str, list[str]]:
    if os.path.isfile(path):
        return {"train": [str(path)]}
    if not os.path.isdir(path):
        text = f"{key}={printable(str(entry), 300)}: no parquet file and no folder of such files ({why_no_file(path)})."
        raise UserError(text)
    found: dict[str, list[str]] = {}
    for file in sorted(path.rglob("*.parquet")):
        name = file.stem.partition("-")[0]
        known = name if name in ("train", "test", "validation", "val", "dev", "heldout") else "train"
        found.setdefault(known, []).append(str(file))
    if entry.split is not None and entry.split not in found:
        raise UserError(f"{key}={entry.path}: no split {entry.split}; there are {', '.join(found)}.")
    return found if entry.split is None else {entry.split: found[entry.split]}


def _load(what: str, entry: DataEntry, key: str, **options: Any) -> Any:
    import datasets

    given = {name: value for name, value in options.items() if value is not None}
    if what != "parquet":
        return _asked(key, entry, lambda: datasets.load_dataset(what, streaming=entry.stream, **given))
    return _tried(key, entry, lambda: datasets.load_dataset(what, streaming=entry.stream, **given))


def _asked(key: str, entry: DataEntry, load: Any) -> Any:
    """What the hub gives out, or what is cached of it."""
    with asking_the_hub() as unreachable:
        try:
            return _tried(key, entry, load)
        except UserError as error:
            if unreachable is None:
                raise
            raise UserError(
                f"{error}; the hub is out of reach ({unreachable}), so the cache has to hold the data set; give files, "
                "or a connection"
            ) from error


def _tried(key: str, entry: DataEntry, load: Any) -> Any:
    import datasets

    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return load()
    except Exception as error:  # of many kinds, by what lies there and what the hub answers
        cause = error.__cause__ or error  # datasets wraps what Arrow says
        reason = printable([*str(cause).strip().splitlines(), type(cause).__name__][0], 300)
        if isinstance(cause, MemoryError):
            reason = f"it takes over {PARQUET_MB} MiB to unpack ({reason}); write it with smaller row groups"
        raise UserError(f"{key}={entry}: the data set can't be loaded: {reason}") from error
    finally:
        if not bars:
            datasets.enable_progress_bars()


def _split(found: Any, entry: DataEntry, key: str) -> Any:
    """One split of what was loaded."""
    if not isinstance(found, dict):
        if entry.split is not None and str(getattr(found, "split", None)) != entry.split:
            raise UserError(f"{key}={entry}: it has no splits; leave split out.")
        return found
    name = entry.split or (next(iter(found)) if len(found) == 1 else None)
    if name not in found:
        what = f"no split {name}" if name else "it has several splits"
        raise UserError(f"{key}={entry}: {what}; name one: {{split: {' or '.join(map(str, found))}}}.")
    return found[name]
