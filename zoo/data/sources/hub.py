"""Hugging Face data sets: folders of `save_to_disk`, parquet files, and ids at the hub, whole or as streams."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.config.entries import DataEntry
from zoo.config.hub import asking_the_hub
from zoo.data.memory_limits import memory_limited
from zoo.errors import UserError, printable
from zoo.files import expanded, why_no_file
from zoo.records import Check, are_texts, is_text, list_of, read_record

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset

_SAVED: dict[str, Check] = {"splits": are_texts, "_data_files": list_of({"filename": is_text}, ("filename",))}
PARQUET_MB = 8192  # MiB that the rank may use to unpack parquet files; a row group is held whole


def load_local(entry: DataEntry, kind: str, key: str) -> Dataset:
    """The data set of a folder of `save_to_disk` (kind "disk") or of parquet files ("parquet").

    Raises:
        UserError: it can't be read, or no such split.
    """
    import datasets

    assert entry.path is not None
    path = expanded(entry.path)
    if kind == "disk":
        _check_names(path, f"{key}={entry}")
        return _split(_translated(key, entry, lambda: datasets.load_from_disk(str(path))), entry, key)
    if entry.split is not None and os.path.isfile(path):
        raise UserError(f"{key}={entry.path}: split={entry.split}: a parquet file has no splits; leave it out.")
    files = parquet_files(path, entry, key)

    def unpack() -> DatasetDict:
        builder = datasets.load_dataset_builder("parquet", data_files=files)
        with memory_limited(PARQUET_MB):  # a kilobyte may stand for gigabytes
            builder.download_and_prepare()
        return builder.as_dataset()  # mapped from disk, and no part of the limit

    return _split(_translated(key, entry, unpack), entry, key)


def _check_names(folder: Path, spec: str) -> None:
    """Check that the files which a folder of `save_to_disk` names lie in it; UserError where not."""
    hint = f"names of files of the same folder are wanted, as save_to_disk writes them ({spec})"
    for file in (folder / "dataset_dict.json", *folder.glob("state.json"), *folder.glob("*/state.json")):
        record = read_record(file, _SAVED, hint=hint) if file.exists() else {}
        names = [*record.get("splits", []), *(data["filename"] for data in record.get("_data_files", []))]
        for name in names:
            if name in ("", ".", "..") or name != Path(name).name:
                text = f"{spec}: {file} names {printable(name, 200)}; files of the same folder are wanted"
                raise UserError(text)


def load_hub(entry: DataEntry, key: str) -> Dataset | IterableDataset:
    """The data set of a hub id, a datasets.IterableDataset under `stream`.

    Raises:
        UserError: it can't be loaded, or no such split.
    """
    import datasets

    options = {name: value for name, value in (("name", entry.name), ("revision", entry.revision)) if value is not None}
    with asking_the_hub() as unreachable:
        try:
            load = partial(datasets.load_dataset, str(entry.hub), streaming=entry.stream, **options)
            loaded = _translated(key, entry, load)
        except UserError as error:
            if unreachable is None:
                raise
            reason = f"the hub is out of reach ({unreachable}), so the cache has to hold the data set"
            raise UserError(f"{error}; {reason}; give files, or a connection") from error
    return _split(loaded, entry, key)


def load_parquet_stream(entry: DataEntry, key: str) -> IterableDataset:
    """The rows of parquet files in order."""
    import datasets

    files = parquet_files(expanded(str(entry.path)), entry, key)
    load = partial(datasets.load_dataset, "parquet", streaming=True, data_files=files)
    return _split(_translated(key, entry, load), entry, key)


def parquet_files(path: Path, entry: DataEntry, key: str) -> dict[str, list[str]]:
    """Split -> parquet files that have rows: `train-00000-of-00002.parquet` is of `train`; others are of `train` too.

    Raises:
        UserError: no such files, one that is none, or no rows in all of them.
    """
    named = _named_parquet_files(path, entry, key)
    files = {split: [file for file in listed if _parquet_rows(file, key)] for split, listed in named.items()}
    if not any(files.values()):
        wanted = "a parquet file with a row for each sample is wanted."
        raise UserError(f"{key}={printable(str(entry), 300)} has no rows; {wanted}")
    return {split: listed for split, listed in files.items() if listed}


def _parquet_rows(file: str, key: str) -> int:
    """Rows of a parquet file, by its footer."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    try:
        footer = read_metadata(file)
    except (ArrowException, OSError, MemoryError) as error:
        why = f"is no parquet file that can be read: {printable(str(error), 300)}."
        raise UserError(f"{key}: {printable(file, 300)} {why}") from error
    return int(footer.num_rows) if footer.num_columns else 0


def _named_parquet_files(path: Path, entry: DataEntry, key: str) -> dict[str, list[str]]:
    if os.path.isfile(path):
        return {"train": [str(path)]}
    if not os.path.isdir(path):
        text = f"{key}={printable(str(entry), 300)}: no parquet file and no folder of such files ({why_no_file(path)})."
        raise UserError(text)
    files: dict[str, list[str]] = {}
    for file in sorted(path.rglob("*.parquet")):
        name = file.stem.partition("-")[0]
        split = name if name in ("train", "test", "validation", "val", "dev", "heldout") else "train"
        files.setdefault(split, []).append(str(file))
    if entry.split is not None and entry.split not in files:
        raise UserError(f"{key}={entry.path}: no split {entry.split}; there are {', '.join(files)}.")
    return files if entry.split is None else {entry.split: files[entry.split]}


def _translated[T](key: str, entry: DataEntry, load: Callable[[], T]) -> T:
    """The data set that a function loads, without progress bars; whatever it raises becomes a UserError."""
    import datasets

    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return load()
    except Exception as error:  # of many kinds, by the files and the hub's answer
        cause = error.__cause__ or error  # datasets wraps Arrow's errors
        reason = printable([*str(cause).strip().splitlines(), type(cause).__name__][0], 300)
        if isinstance(cause, MemoryError):
            reason = f"it takes over {PARQUET_MB} MiB to unpack ({reason}); write it with smaller row groups"
        raise UserError(f"{key}={entry}: the data set can't be loaded: {reason}") from error
    finally:
        if not bars:
            datasets.enable_progress_bars()


def _split[T: Dataset | IterableDataset](loaded: T | dict[str, T], entry: DataEntry, key: str) -> T:
    """The split of a data set that the entry names."""
    if not isinstance(loaded, dict):
        if entry.split is not None and str(getattr(loaded, "split", None)) != entry.split:
            raise UserError(f"{key}={entry}: it has no splits; leave split out.")
        return loaded
    name = entry.split or (next(iter(loaded)) if len(loaded) == 1 else None)
    if name is None or name not in loaded:
        problem = f"no split {name}" if name else "it has several splits"
        raise UserError(f"{key}={entry}: {problem}; name one: {{split: {' or '.join(map(str, loaded))}}}.")
    return loaded[name]
