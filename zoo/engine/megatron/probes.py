"""Whether the installed megatron-core has a fault that would harm a run's data, asked of megatron-core itself.

A version's number does not say so: a release may come without the fix, or change what a shim stands on. These probes are
small enough for every start (some 20 ms): each calls megatron-core's own function with a case that the fault gets wrong.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.checkpoint.api import CheckpointException

_sprung: list[str] = []


def _spring(name: str) -> list[str]:
    """What a trap runs when it is unpickled."""
    _sprung.append(name)
    return _sprung


class _Trap:
    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _spring, (self.name,)


def pickles_that_ran() -> set[str]:
    """The places of a checkpoint from which megatron-core runs code on loading: "index", "common state", "object".

    Loads, the way that zoo loads a checkpoint, a folder with a harmless trap in each of these places, and one without a trap.
    Raises whatever megatron-core raises for the last one, because the result is unknown then.
    """
    _sprung.clear()
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings(), _unlogged():
        warnings.simplefilter("ignore")
        for folder in (_index_trap(root), _object_trap(root, "common state"), _object_trap(root, "object")):
            # A trap that springs leaves no checkpoint, and one that is refused is an error.
            with contextlib.suppress(Exception, CheckpointException):
                _load(folder)
        try:
            loaded = _load(_object_trap(root, ""))
        except CheckpointException as error:  # which is no Exception
            raise ValueError(f"a checkpoint without a trap can't be read: {error}") from error
    if loaded["object"] != 0 or loaded["step"] != 0:
        raise ValueError(f"a checkpoint of two numbers was read as {loaded!r}")
    return set(_sprung)


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Without warnings by `logging`: torch 2.15 logs a traceback of each trap that is refused."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _load(folder: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject

    wanted = {"object": ShardedObject("object", None, (1,), (0,))}
    alone = patch("torch.distributed.get_rank", lambda *_: 0)  # asked for, also where there are no groups yet
    with alone:
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(folder), validate_access_integrity=False)
    return loaded


def _folder(root: str, name: str) -> Path:
    folder = Path(root) / name
    folder.mkdir()
    settings = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps({**settings, "common_backend": "torch"}))
    return folder


def _index_trap(root: str) -> Path:
    folder = _folder(root, "index")
    (folder / ".metadata").write_bytes(pickle.dumps(_Trap("index")))
    return folder


def _object_trap(root: str, name: str) -> Path:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = _folder(root, name or "none")
    parts: dict[str, Any] = {"common_state": {"step": 0}, "object": 0}
    if name:
        parts[name.replace(" ", "_")] = _Trap(name)
    writer = FileSystemWriter(folder, sync_files=False)
    stored = {f"{key}/shard_0_1": [value] for key, value in parts.items()}
    save(stored, storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    index = pickle.loads((folder / ".metadata").read_bytes())  # written just now, right here
    index.storage_meta = None  # megatron-core's checkpoints have none
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return folder


def moments_are_saved_whole() -> bool:
    """Whether a save of the optimizer's state holds the right values for each parameter when padding ends the buckets.

    Raises whatever megatron-core raises where it describes that state by other means than those of 0.19.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    first, second = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])
    buckets = [SimpleNamespace(grad_data=torch.zeros(8), numel_unpadded=len(p)) for p in (first, second)]
    ranges = {first: (0, 3, 0), second: (8, 10, 1)}  # the first bucket ends with padding of 5
    together = {"param": torch.cat([first, second]), "numel_unpadded": 5}
    optimizer: Any = SimpleNamespace(
        buffers=[SimpleNamespace(param_index_map=ranges, buckets=buckets, numel_unpadded=5)],
        gbuf_ranges=[{torch.float32: [{}, {}]}],
        get_parameter_state_dp_zero=lambda **_: {0: {torch.float32: together}},
    )
    described: Any = {
        str(i): ShardedTensor.from_rank_offsets(str(i), p) for i, p in enumerate((first, second))
    }
    saved = DistributedOptimizer.sharded_param_state_fully_reshardable(optimizer, described, False, {})
    assert saved is not None
    found = [state["param"].data.tolist() for state in saved.values()]
    return found == [first.tolist(), second.tolist()]
