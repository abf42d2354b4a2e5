"""The hardware overlay of a run: by name, or by the GPUs that are here."""

from __future__ import annotations

import os

from zoo.config.devices import gpu_count, gpu_memory
from zoo.config.files import Layer, hardware_names, read_hardware
from zoo.errors import ConfigError

AUTO, CPU = "auto", "cpu"
_NEAR = 0.97  # of a kind's memory; a GPU shows somewhat more or less than it is sold as


def hardware_layers(name: str) -> list[Layer]:
    """The layers of `hardware=NAME`.

    `auto` is `cpu` where there is no GPU, else as many as are here of the largest kind that is no larger than they
    are, with their own memory in its place.
    """
    if name != AUTO:
        return [read_hardware(name)]
    gpus = gpu_count()
    if not gpus:
        return [read_hardware(CPU)]
    memory = round(gpu_memory() / 1e9, 1)
    here = {"gpus": gpus, "nodes": nodes(), "memory_gb": memory}
    sizes = {kind: _memory(kind) for kind in hardware_names()}
    known = {kind: size for kind, size in sizes.items() if size}
    fitting = [kind for kind, size in known.items() if memory >= _NEAR * size] or [
        min(known, key=known.__getitem__)
    ]
    return [read_hardware(max(fitting, key=known.__getitem__)), Layer("the GPUs here", {"machine": here})]


def _memory(kind: str) -> float | None:
    return (read_hardware(kind).tree.get("machine") or {}).get("memory_gb")


def nodes() -> int:
    """Nodes of the run, as torchrun or SLURM says."""
    for all_ranks, of_node in (("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("SLURM_JOB_NUM_NODES", None)):
        try:
            if all_ranks in os.environ and (of_node is None or of_node in os.environ):
                return max(1, int(os.environ[all_ranks]) // (int(os.environ[of_node]) if of_node else 1))
        except ValueError:
            raise ConfigError(f"{all_ranks}={os.environ[all_ranks]}: wanted a whole number") from None
    return 1
