"""Reading checkpoints without running what they may hold: megatron-core's and torch's own readers unpickle anything.

torch_dist files are two kinds of pickle: `.metadata`, which says what lies where, and objects between the tensors
(megatron-core's common state, and a rank's random state). The first is read with the few classes it needs, the others
with `torch.load(weights_only=True)`. `zoo.engine.megatron.compat` puts these readers in the place of megatron-core's.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load

from zoo.errors import UserError

_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Knows the classes of `.metadata` and no other name."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class SafeReader(FileSystemReader):
    """torch's reader of a folder, whose `.metadata` can neither run anything nor point out of the folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises UserError where the file is not what a checkpoint has there."""
        path = Path(self.path) / ".metadata"
        try:
            metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError("it holds something else")
            for place in dict(metadata.storage_data).values():
                if (
                    not isinstance(place, _StorageInfo)
                    or Path(place.relative_path).name != place.relative_path
                ):
                    raise pickle.UnpicklingError("it points out of the folder")
        except FileNotFoundError:
            raise UserError(f"{path} is missing; take another checkpoint") from None
        except Exception as error:  # whatever bytes that are no pickle lead to
            raise UserError(f"{path} is not the index of a checkpoint: {error}; take another one") from None
        return metadata


class SafePlanner(MCoreLoadPlanner):
    """megatron-core's planner, which takes objects of plain values and tensors alone."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Raises UserError where an object would run something."""
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            why = str(error).splitlines()[0]
            raise UserError(f"its object {name!r} is refused ({why})") from None


def reader(checkpoint_dir: str | Path, *_: Any, **__: Any) -> SafeReader:
    """In the place of megatron-core's `_get_filesystem_reader`."""
    return SafeReader(str(checkpoint_dir))


def common_state(checkpoint_dir: str | Path) -> dict[str, Any]:
    """In the place of megatron-core's `load_common_state_dict`; there is no common.pt in zoo's checkpoints."""
    key = ShardedObject("common_state", None, (1,), (0,)).unique_key
    wanted: dict[str, Any] = {key: io.BytesIO()}
    planner = SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    load(wanted, storage_reader=reader(checkpoint_dir), planner=planner, no_dist=True)
    state: dict[str, Any] = wanted[key][0]
    return state
