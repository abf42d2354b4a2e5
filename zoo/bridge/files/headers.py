"""Headers and indexes of safetensors files, checked against the files' sizes before any tensor is read.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from zoo.errors import LONGEST, UserError, printable
from zoo.files import parse_json, read_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
_MAX_HEADER = 2**25  # bytes of a header or an index, for some 300,000 tensors; read, they take 30 times that
_MAX_RANK = 16  # dimensions of a tensor; more is a damaged header


class CheckpointError(UserError):
    """A folder that is no whole safetensors checkpoint; its message has at most LONGEST characters, on one line."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, LONGEST))


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    nbytes: int
    offset: int  # of its first byte in the file


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Name -> TensorInfo of a safetensors file's tensors, after checking the header against the file's size."""
    try:
        with open(file, "rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER, size - 8):
                raise CheckpointError(
                    f"{file}: truncated or no safetensors file (header of {length}, {size} bytes in all)"
                )
            header = parse_json(stream.read(length), file, most=_MAX_HEADER, unique=True, error=CheckpointError)
            if not isinstance(header, dict):
                raise CheckpointError(f"{file}: its JSON is no object")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    header.pop("__metadata__", None)
    spans, tensors = [], {}
    for name, entry in header.items():
        info, span = _tensor_info(name, entry, file, data=8 + length)
        tensors[name] = info
        spans.append((*span, name))
    _check_spans(spans, size - 8 - length, file)
    return tensors


def _tensor_info(name: str, entry: object, file: Path, data: int) -> tuple[TensorInfo, tuple[int, int]]:
    """The TensorInfo of a header entry and its (begin, end) in the data, which begin at byte `data` of the file.

    CheckpointError where they contradict.
    """
    where = f"{file}: header entry of {name[:200]!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} is not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where} has dtype {str(dtype)[:40]!r}, wanted one of {', '.join(DTYPES)}")
    if not _is_sizes(shape) or len(shape) > _MAX_RANK or not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has shape {str(shape)[:80]} and offsets {str(offsets)[:80]}, wanted sizes")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(f"{where}: {offsets[1] - offsets[0]} bytes for shape {shape} of {dtype}, wanted {nbytes}")
    info = TensorInfo(tuple(shape), DTYPES[dtype], file, nbytes, data + offsets[0])
    return info, (offsets[0], offsets[1])


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_spans(spans: list[tuple[int, int, str]], data_bytes: int, file: Path) -> None:
    """Tensors must lie end to end and fill the file: no overlap, no hole, nothing cut off."""
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            kind = "overlaps the tensor before it" if begin < position else "leaves a hole before it"
            raise CheckpointError(f"{file}: {name[:200]!r} starts at byte {begin}, wanted {position}: it {kind}")
        position = end
    if position != data_bytes:
        raise CheckpointError(f"{file}: {data_bytes} bytes of data, wanted {position}: truncated or overlong")


def read_index(index: Path) -> dict[str, str]:
    """Tensor name -> shard file name; the names must be plain file names, so that nothing leaves the folder."""
    if index.stat().st_size > _MAX_HEADER:
        raise CheckpointError(f"{index}: over {_MAX_HEADER // 2**20} MiB, which is no index")
    weight_map = read_object(index, most=_MAX_HEADER, unique=True, error=CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map in it")
    for name, file in weight_map.items():
        plain = isinstance(file, str) and file == Path(file).name and "\\" not in file and "\0" not in file
        if not plain or not file.endswith(".safetensors") or len(file.encode(errors="replace")) > 255:
            raise CheckpointError(
                f"{index}: {name[:200]!r} is in {str(file)[:200]!r}, wanted a .safetensors file of this folder"
            )
    return weight_map


def read_shards(folder: Path, weight_map: dict[str, str]) -> dict[str, TensorInfo]:
    """The tensors of all shards, which must be exactly those of the index."""
    tensors: dict[str, TensorInfo] = {}
    problems = []
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            problems.append(f"{file} is missing")
            continue
        for name, info in read_header(folder / file).items():
            if weight_map.get(name) != file:
                problems.append(f"{name} is in {file}, the index says {weight_map.get(name, 'nothing of it')}")
            tensors.setdefault(name, info)
    missing_files = {file for file in weight_map.values() if not (folder / file).is_file()}
    problems += [f"{n} is not in {f}" for n, f in weight_map.items() if n not in tensors and f not in missing_files]
    if problems:
        more = f" (and {len(problems) - 20} more)" if len(problems) > 20 else ""
        raise CheckpointError(f"{folder}: index and shards differ: {'; '.join(problems[:20])}{more}")
    return tensors
