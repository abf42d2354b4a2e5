"""Rows as Python objects, written to one file that all ranks map into memory: dicts with pictures, arrays and bytes in them.

The file is Arrow's, a row a record: `row`, the row as JSON in which `{"medium": 3}` under MARK stands for a medium, and `media`, the
bytes of its media. Pictures are written as PNG and sound as WAV, both without loss. Writing takes the memory of one batch
(BATCH_MB), however many rows there are; reading takes that of a row.
"""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zoo.data.errors import bad_row
from zoo.data.sources.kept.columns import record_batch
from zoo.data.sources.references import Blob, is_image, shown, undecoded
from zoo.errors import UserError
from zoo.types import JsonObject

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIX = ".rows.arrow"
MARK = "zoo_medium"  # the one key of a mapping that stands for a medium
BATCH_MB = 64  # MiB of rows that are held while they are written
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
RATE = 16_000  # Hz of an array that comes without one
WAV_TYPES = {"int16": "PCM_16", "int32": "PCM_32", "uint8": "PCM_U8", "float64": "DOUBLE"}


def write_objects(rows: Iterable[object], path: Path, name: str) -> int:
    """Write rows, an iterable of dicts that is read once, to a file that ends in SUFFIX, whole or not at all; how many there are.

    `name` is what the rows are called in messages.

    Raises:
        UserError: no rows, or one that holds something else than plain values and media.
    """
    import pyarrow as pa

    schema = pa.schema([("row", pa.large_binary()), ("media", pa.list_(pa.large_binary()))])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    try:
        with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for batch in _batches(rows, name):
                count += len(batch)
                writer.write_batch(record_batch([*zip(*batch, strict=True)], schema))
        if not count:
            raise UserError(f"{name} has no rows; a list of dicts is wanted")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def listed(rows: Any) -> Any:
    """A pandas DataFrame, or an iterator, as a list of rows; all else unchanged."""
    return list(as_dicts(rows)) if hasattr(rows, "itertuples") or isinstance(rows, Iterator) else rows


def as_dicts(rows: Any) -> Iterable[object]:
    """The rows of a pandas DataFrame as dicts, cells without a value left out; other rows unchanged."""
    if not (hasattr(rows, "itertuples") and hasattr(rows, "columns")):
        return rows
    names = [str(name) for name in rows.columns]
    return (
        {name: _cell(cell) for name, cell in zip(names, cells, strict=True) if not _is_missing(cell)}
        for cells in rows.itertuples(index=False, name=None)
    )


def _is_missing(cell: object) -> bool:
    """Whether a cell is what pandas writes for no value: None, NaN, NaT or NA."""
    return cell is None or type(cell).__name__ in ("NAType", "NaTType") or (isinstance(cell, float) and cell != cell)


def _cell(value: object, inner: bool = False) -> object:
    """A cell with lists in the place of the arrays that pandas reads of parquet; an array that is a cell stays one (it is sound)."""
    if isinstance(value, np.ndarray) and (inner or value.dtype == object):
        value = value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        is_sound = "sampling_rate" in value
        return {key: _cell(field, not is_sound) for key, field in value.items() if not _is_missing(field)}
    return [_cell(item, True) for item in value] if isinstance(value, list) else value


def _batches(rows: Iterable[object], name: str) -> Iterator[list[tuple[bytes, list[bytes]]]]:
    batch: list[tuple[bytes, list[bytes]]] = []
    size = 0
    for number, row in enumerate(as_dicts(rows), start=1):
        if not isinstance(row, Mapping):
            raise UserError(f"{name}: row {number} is a {type(row).__name__}; a dict is wanted")
        media: list[bytes] = []
        try:
            text = json.dumps(_plain(row, media, "the row"), ensure_ascii=False).encode(errors="surrogatepass")
        except (ValueError, TypeError, OSError, RecursionError) as error:
            raise UserError(f"{name}: row {number}: {error}") from error
        batch.append((text, media))
        size += len(text) + sum(map(len, media))
        if size > BATCH_MB * 2**20:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _plain(value: object, media: list[bytes], where: str) -> object:
    """A value as JSON can hold it, its media moved to `media`; ValueError for a value that is neither."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping) and not (value.get("array") is not None and "sampling_rate" in value):
        return {str(key): _plain(field, media, f"{where}[{str(key)[:40]!r}]") for key, field in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, media, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    media.append(_encoded(value, where))
    return {MARK: len(media) - 1}


def _encoded(value: object, where: str) -> bytes:
    """A medium as a file; ValueError for a value that is none."""
    if isinstance(value, Mapping):
        return _wav(_array(value["array"]), value["sampling_rate"], where)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if is_image(value):
        try:
            data = undecoded(value)
        except ValueError as error:
            raise ValueError(f"{where} is {error}") from error
        return _png(value) if data is None else data
    if not isinstance(value, np.ndarray) and not hasattr(value, "detach"):
        wanted = "texts, numbers, lists, dicts, pictures, arrays, bytes and paths are wanted"
        raise ValueError(f"{where} is a {type(value).__name__}, which can't be written for the ranks; {wanted}")
    array = _array(value)
    if array.ndim in (1, 2):
        return _wav(array, RATE, where)
    if array.ndim == 3 and array.dtype == np.uint8:
        from PIL import Image

        first = array.shape[0] in (1, 3) and array.shape[-1] not in (1, 3, 4)
        pixels = array.transpose(1, 2, 0) if first else array
        return _png(Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else np.ascontiguousarray(pixels)))
    wanted = "sound of one or two dimensions, or an image of uint8 and three is wanted"
    raise ValueError(f"{where} is an array of {array.dtype} and shape {array.shape}; {wanted}")


def _array(value: Any) -> np.ndarray:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _png(image: Image) -> bytes:
    """An image without loss, its EXIF orientation kept."""
    file = io.BytesIO()
    if image.mode in ("F", "I"):
        image.save(file, "tiff")
    else:
        plain = image if image.mode in PNG_MODES else image.convert("RGB")
        plain.save(file, "png", compress_level=1, exif=image.getexif())
    return file.getvalue()


def _wav(array: np.ndarray, rate: float, where: str) -> bytes:
    import soundfile

    if array.dtype.kind not in "fiu" or array.ndim not in (1, 2) or not array.size:
        raise ValueError(f"{where} is an array of {array.dtype} and shape {array.shape}; samples of sound are wanted")
    samples = array.T if array.ndim == 2 and array.shape[0] < array.shape[1] else array
    if array.dtype == np.uint8:  # soundfile takes no bytes
        samples = (samples.astype(np.int16) - 128) << 8
    elif str(array.dtype) not in (*WAV_TYPES, "float32"):
        samples = samples.astype(np.float32)
    file = io.BytesIO()
    kind = "PCM_16" if array.dtype == np.uint8 else WAV_TYPES.get(str(samples.dtype), "FLOAT")
    soundfile.write(file, samples, int(rate), format="WAV", subtype=kind)
    return file.getvalue()


class ObjectRows:
    """The rows of a file of `write_objects`, by their index.

    Raises:
        UserError: no such file.
    """

    def __init__(self, path: Path, name: str) -> None:
        import pyarrow as pa

        try:
            self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
            sizes = [self._reader.get_batch(n).num_rows for n in range(self._reader.num_record_batches)]
            if self._reader.schema.names != ["row", "media"]:
                raise ValueError("its columns are others")
        except (OSError, ValueError) as error:  # Arrow's errors are ValueErrors
            raise UserError(f"{name}: no file of rows that zoo wrote: {error}") from error
        self._starts = np.array([0, *itertools.accumulate(sizes)], np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __call__(self, index: int) -> JsonObject:
        """The row of an index."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        batch, inner = self._reader.get_batch(number), index - int(self._starts[number])
        try:
            media = batch.column(1)[inner].as_py() or []
            row = json.loads(batch.column(0)[inner].as_py(), object_hook=lambda item: _restored(item, media))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise bad_row(f"the row can't be read: {shown(str(error))}.") from error
        if not isinstance(row, dict):
            raise bad_row(f"the row is a {type(row).__name__}; a dict is wanted.")
        return row


def _restored(item: JsonObject, media: list[bytes]) -> object:
    """A mapping of a row, or the medium that it stands for."""
    return Blob(media[item[MARK]], f"medium {item[MARK]} of the row") if list(item) == [MARK] else item
