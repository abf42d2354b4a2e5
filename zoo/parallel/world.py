"""Process groups of a run: torch.distributed and mcore's parallel state, from a recipe."""

from __future__ import annotations

import os
import random
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from zoo.config.devices import cpu_threads, gpu_count, share_of_cores
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.nn.graphs.recorder import release_all
from zoo.parallel import determinism
from zoo.parallel.megatron import compat, cpu_host
from zoo.parallel.process_state import preserve_process_state

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch._C._distributed_c10d import Store

TIMEOUT = timedelta(minutes=30)
SWITCH_SECONDS = 2e-4  # after which a thread gives the interpreter to another one that waits; Python: 5e-3
_ANSWER_SECONDS = 0.05  # between two looks for ranks that ask for the name of their start
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp")


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks: its rank in each process group, and the groups' sizes."""

    rank: int
    size: int
    device: torch.device
    dp_rank: int
    dp_size: int
    tp_rank: int
    cp_rank: int
    pp_rank: int
    pp_size: int
    groups: ProcessGroupCollection

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes logs."""
        return self.rank == 0

    @property
    def counts_data(self) -> bool:
        """Whether this rank's host counts stand for its data-parallel replica."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.pp_rank == 0

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's share of the loss is to be summed."""
        return self.tp_rank == 0 and self.pp_rank == self.pp_size - 1

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all ranks, one collective and one device sync."""
        summed: list[float] = self.sum_array(np.array(values, np.float64)).tolist()
        return summed

    def sum_array(self, values: np.ndarray) -> np.ndarray:
        """The same of an array of float64."""
        tensor = torch.from_numpy(values).to(self.device)
        dist.all_reduce(tensor)
        return tensor.cpu().numpy()


@contextmanager
def open_world(recipe: Recipe) -> Iterator[World]:
    """Initialise torch.distributed and megatron-core's parallel state for the block, and take both down after it.

    Raises UserError where torch.distributed is in use already: its groups belong to the caller.
    """
    if dist.is_initialized():
        raise UserError(
            "torch.distributed is in use in this process, which zoo needs for itself; end that first "
            "(torch.distributed.destroy_process_group), or call zoo from another process"
        )
    with settings(recipe) as device, groups(recipe, device) as world:
        yield world


@contextmanager
def settings(recipe: Recipe, device: torch.device | None = None) -> Iterator[torch.device]:
    """Settings of the process under which a model is built and run; the block gets this rank's device.

    The caller's settings are back after the block. `device`: what an earlier block of this process got. Without it, a GPU is the
    one of LOCAL_RANK, or the caller's current one where torch.distributed is in use already.
    """
    with preserve_process_state(), cpu_host.redirected() as on_cpu, compat.installed():
        determinism.install(recipe, on_cpu)
        if device is not None:
            pass  # known from an earlier block
        elif on_cpu:
            device = torch.device("cpu")
        elif dist.is_initialized() and "LOCAL_RANK" not in os.environ:
            device = torch.device("cuda", torch.cuda.current_device())
        else:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if not on_cpu:
            torch.cuda.set_device(device)
            # The thread that prepares batches would wait 5 ms each time that it needs the interpreter.
            sys.setswitchinterval(SWITCH_SECONDS)
        torch.set_num_threads(cpu_threads(recipe.engine.threads))
        with determinism.plain_fp32():
            yield device


@contextmanager
def groups(recipe: Recipe, device: torch.device) -> Iterator[World]:
    """The process groups of a recipe, within `settings`.

    torch.distributed is initialised where it is not, and taken down again. Where the caller has initialised it, his ranks
    are taken, and only the groups that were made here are destroyed.

    Raises:
        UserError: megatron-core's parallel state is in use, or the caller's groups can't exchange tensors of a GPU.
    """
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        raise UserError(
            "megatron-core's parallel state is in use in this process, by another zoo.Engine or by other code; close that first"
        )
    joined = dist.is_initialized()
    before = _groups() if joined else set()
    if joined and device.type == "cuda" and "nccl" not in str(dist.get_backend_config()):
        raise UserError(
            f"torch.distributed was initialised with backend {dist.get_backend()!r}, which can't exchange tensors of a GPU as "
            "zoo needs it; initialise it with nccl"
        )
    try:
        if not joined:
            _init_distributed(device.type == "cpu", device)
        yield _init_model_parallel(recipe, device)
    finally:
        _take_down(before if joined else None)


def _groups() -> set[dist.ProcessGroup]:
    """All process groups of this rank."""
    return set(dist.distributed_c10d._world.pg_map)


def _take_down(before: set[dist.ProcessGroup] | None) -> None:
    """`before`: the groups of a caller, which stay; None where torch.distributed was initialised here."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    release_all()  # graphs hold work of the groups
    destroy_moe_metrics_tracker()  # it holds groups of this world, and metrics of its last forward pass
    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # that of the last step
    parallel_state.destroy_model_parallel()
    get_cuda_rng_tracker().reset()
    if not dist.is_initialized():
        return
    if before is None:
        dist.destroy_process_group()
        return
    for group in _groups() - before:
        dist.destroy_process_group(group)


def cores_beside_gpu(recipe: Recipe, world: World) -> int | None:
    """This rank's share of the cores for work on whole weights, where steps use one (`cpu_threads`); None without GPUs."""
    ranks = min(world.size, gpu_count())  # of this host: each has a GPU of its own
    return (recipe.engine.threads or share_of_cores(ranks)) if ranks else None


@contextmanager
def on_all_cores(recipe: Recipe, world: World) -> Iterator[None]:
    """Use `cores_beside_gpu` inside the block."""
    threads = torch.get_num_threads()
    if count := cores_beside_gpu(recipe, world):
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def on_one_rank(recipe: Recipe) -> Recipe:
    """The recipe with every parallel size 1 and without sequence parallelism."""
    whole = {"parallel.sp": False, "parallel.stage_layers": []}
    return recipe.replace({f"parallel.{name}": 1 for name in _SIZES} | whole)


@contextmanager
def alone(recipe: Recipe) -> Iterator[World]:
    """A world of this process alone, whatever launcher started it and whatever its parallel sizes are."""
    with preserve_process_state():
        for name in _LAUNCHED:
            os.environ.pop(name, None)
        with open_world(on_one_rank(recipe)) as world:
            yield world


def _init_distributed(on_cpu: bool, device: torch.device) -> None:
    exported: Any = dist  # more than it says
    # Without a device_id: with one, a rank that a new gloo group leaves out joins NCCL's split of all ranks for it, in
    # which those of the group take no part, and waits for good (torch 2.11, `_new_process_group_helper`).
    options: dict[str, Any] = {"backend": "gloo" if on_cpu else "nccl", "timeout": TIMEOUT}
    if "RANK" not in os.environ:
        options |= {"store": exported.HashStore(), "rank": 0, "world_size": 1}
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, rank, size = next(exported.rendezvous("env://", timeout=TIMEOUT))
        store = exported.PrefixStore(_met(store, rank, size), store)
        options |= {"store": store, "rank": rank, "world_size": size}
    dist.init_process_group(**options)
    if not on_cpu:
        warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
        if dist.get_world_size() > 1:  # one rank may never exchange anything: plans and checks have such a world
            dist.all_reduce(torch.zeros(1, device=device))  # barriers go by the device of the first exchange


def _met(store: Store, rank: int, size: int) -> str:
    """A name that the ranks of this start alone know.

    torchrun keeps its store when it starts ranks again, and what those before have left in it must not be read. Its
    TORCHELASTIC_RESTART_COUNT names no start: each node counts the failures that it has seen itself. So every rank asks by a
    name of its own, which no earlier one has had, and the first answers under that.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"zoo-asks{rank}", own)
        name = store.get(own).decode()
        store.add(name, 1)
        return name
    answered: dict[int, bytes] = {}
    while store.add(own, 0) < size - 1:
        for other, asking in enumerate(store.multi_get([f"zoo-asks{other}" for other in range(1, size)]), start=1):
            if answered.get(other) != asking:  # new, or a rank that was started again meanwhile
                answered[other] = asking
                store.set(asking.decode(), own)
        time.sleep(_ANSWER_SECONDS)
    return own


def _init_model_parallel(recipe: Recipe, device: torch.device) -> World:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel = recipe.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        distributed_timeout_minutes=int(TIMEOUT.total_seconds() // 60),
        create_gloo_process_groups=False,
    )
    seed_everything(recipe.run.seed)
    model_parallel_cuda_manual_seed(recipe.run.seed, force_reset_rng=True)
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        device=device,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        groups=ProcessGroupCollection.use_mpu_process_groups(),
    )


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch alike on every rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
