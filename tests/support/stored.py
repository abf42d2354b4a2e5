"""Tensors as megatron-core describes them, and pieces of them in a checkpoint's files; without a model."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.checkpoint.storage import disk
from zoo.checkpoint.storage.cpu_copy import CpuCopy
from zoo.checkpoint.storage.index import Index, RankTable, write_index
from zoo.checkpoint.storage.pieces import Piece

CPU = torch.device("cpu")


def described(key: str, tensor: Tensor, *cuts: tuple[int, int, int], lead: int = 0) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return ShardedTensor.from_rank_offsets(key, tensor, *cuts, prepend_axis_num=lead)


def two_halves(key: str, tensor: Tensor) -> Any:
    """A factory as the experts and the gated delta net have them: two tensors, cut along the second axis."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    def build(name: str, given: Tensor, replica: Any, _: Any) -> list[Any]:
        return [described(f"{name}_{i}", part) for i, part in enumerate(given.chunk(2, dim=1))]

    return ShardedTensorFactory(key, tensor, build, lambda parts: torch.cat(parts, dim=1))


def save(folder: Path, by_rank: list[list[Piece]], objects: list[dict[str, bytes]] | None = None) -> Index:
    """Each rank's pieces written as a run writes them."""
    folder.mkdir(exist_ok=True)
    tables, checksums = [], {}
    for rank, pieces in enumerate(by_rank):
        copied = CpuCopy(CPU)
        copied.take(pieces, objects[rank] if objects else {})
        files = [(f"rank{rank}_{i}.bin", size) for i, size in enumerate(disk.parts(copied.size))]
        checksums |= disk.write(folder, files, copied.view(), lambda count: None)
        tables.append(RankTable(files, copied.pieces, copied.objects))
    write_index(folder, tables)
    return Index(folder, checksums)
