"""Arrow's columns from Python values and to numpy, without `pyarrow.array` and `to_numpy`, which import pandas (0.4 s)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pyarrow import Array, ChunkedArray, DataType, RecordBatch, Schema


def record_batch(columns: Sequence[Sequence[Any] | np.ndarray], schema: Schema) -> RecordBatch:
    """`pyarrow.record_batch` of integers, texts, bytes, bytes of one length, and lists of these; only texts and lists may be None."""
    import pyarrow as pa

    arrays = [_array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def numbers(column: ChunkedArray) -> np.ndarray:
    """(N,) numbers of a column without nulls; it may not be written to."""
    return np.from_dlpack(column.combine_chunks())


def _array(values: Sequence[Any] | np.ndarray, kind: DataType) -> Array:
    import pyarrow as pa

    if pa.types.is_integer(kind):
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.asarray(values, str(kind)))])
    if pa.types.is_fixed_size_binary(kind):
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(b"".join(values))])
    valid = np.packbits(np.array([value is not None for value in values], bool), bitorder="little")
    parts = [value.encode() if isinstance(value, str) else value or b"" for value in values]
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int64 if pa.types.is_large_binary(kind) else np.int32)
    buffers = [pa.py_buffer(valid), pa.py_buffer(ends)]
    if pa.types.is_list(kind):
        children = [_array([*chain.from_iterable(parts)], kind.value_type)]
        return pa.Array.from_buffers(kind, len(values), buffers, children=children)
    return pa.Array.from_buffers(kind, len(values), [*buffers, pa.py_buffer(b"".join(parts))])
