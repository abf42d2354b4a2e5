"""Checkpoints to resume from: `checkpoints/iter_N/` in the run folder, sharded, published whole or not at all.

Weights, optimizer state, schedule and random states are in megatron-core's torch_dist format; step, data position and
the model's description lie beside them in `state.json`. This file reads them; `zoo.engine.checkpoint` writes them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zoo.config.locate import BASE, STATE, Place, locate, look
from zoo.config.schema import Recipe
from zoo.engine.checkpoint.random_state import set_random_state
from zoo.engine.checkpoint.selection import refuse_faults
from zoo.engine.distributed.world import World
from zoo.engine.megatron import compat
from zoo.engine.model.lora import Adapters, settings_of
from zoo.errors import UserError


@dataclass(frozen=True)
class Trainable:
    """What a checkpoint holds, beside plain values: DDP-wrapped chunks, optimizer, schedule."""

    chunks: Sequence[Any]
    optimizer: Any
    scheduler: Any
    adapters: Adapters | None = None  # these alone are kept, where there are some


def describe(recipe: Recipe, hf_config: Any) -> dict[str, Any]:
    """What two runs must share to share checkpoints: family, architecture, adapters."""
    arch = json.loads(hf_config.to_json_string(use_diff=False))
    for key in ("_name_or_path", "transformers_version", "dtype", "architectures"):
        arch.pop(key, None)
    adapters = {"lora": settings_of(recipe)} if recipe.lora.rank else {}
    return {"family": recipe.model.family, "arch": arch, **adapters}


def origin(recipe: Recipe) -> dict[str, Any]:
    """What else an export of a checkpoint needs to know: where tensors that are not trained lie, and what was built."""
    init = recipe.model.init
    place = look(init)
    return {
        "init": str(place.folder.absolute()) if place else init,
        "mtp_loss": recipe.train.mtp_loss,
        **({"lora": settings_of(recipe)} if recipe.lora.rank else {}),
    }


def read_origin(run: Place) -> dict[str, Any]:
    """`origin` of a run's checkpoint."""
    weights = json.loads((run.folder / STATE).read_text(encoding="utf-8")).get("weights")
    if weights is None:
        raise UserError(
            f"{run.folder}: its {STATE} is of an earlier zoo, which exported at the end of a run alone"
        )
    return weights


def started_from(run: Place) -> Place | None:
    """Where the weights come from that a run started from, None for random ones; of adapters, what they belong to."""
    told, base = read_origin(run), run.folder.parent.parent / BASE
    if "lora" in told and (base / "config.json").is_file():
        return locate(str(base))
    if "lora" in told and told["init"] == "random":
        raise UserError(f"{run.folder} holds adapters, and what they belong to is not in {base}; put it back")
    return None if told["init"] == "random" else locate(told["init"], key=f"{run.folder / STATE}: init")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint."""
    state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return state


def load(trainable: Trainable, checkpoint: Path, world: World, ranks: int) -> None:
    """Put a checkpoint's weights, optimizer state and schedule into what was built for this run.

    The random generators go on from their states where it was written by so many `ranks` as there are now.
    """
    from megatron.core.dist_checkpointing import ShardedObject

    compat.allocate_optimizer_state(trainable.optimizer)
    wanted = _wanted(trainable, world)
    fresh = _leave_out_fresh(wanted["optimizer"], trainable.optimizer, checkpoint)
    if ranks == world.size:
        wanted["random"] = ShardedObject("random", None, (world.size,), (world.rank,), replica_id=0)
    loaded = _load(wanted, checkpoint)
    if trainable.adapters is not None:
        trainable.adapters.load(loaded["adapters"])
    else:
        for index, chunk in enumerate(trainable.chunks):
            chunk.module.load_state_dict(loaded[f"model{index}"], strict=True)
    step = loaded["scheduler"]["num_steps"]
    _begin_fresh(loaded["optimizer"], trainable.optimizer, fresh)
    compat.load_optimizer_state(trainable.optimizer, loaded["optimizer"], step)
    trainable.scheduler.load_state_dict(loaded["scheduler"])
    if "random" in loaded:
        set_random_state(loaded["random"])


def _parts(optimizer: Any, state: dict[Any, Any]) -> list[tuple[Any, dict[int, dict[str, Any]]]]:
    """Each chained optimizer with its own part of the state: parameter, by its place in the buffers -> tensors by name."""
    chained = optimizer.chained_optimizers
    parts = [state] if len(chained) == 1 else [state[i] for i in range(len(chained))]
    return [(one, part["param_state"]) for one, part in zip(chained, parts, strict=True)]


def _leave_out_fresh(state: dict[Any, Any], optimizer: Any, checkpoint: Path) -> list[tuple[int, int, str]]:
    """Take tensors out of the wanted state that the checkpoint lacks, as their parameters were frozen when it was written.

    Returns:
        (chained optimizer, parameter, name) of each.
    """
    there, fresh = _shapes(checkpoint), []
    for number, (_, parameters) in enumerate(_parts(optimizer, state)):
        for place, tensors in parameters.items():
            for name in [
                name for name, entry in tensors.items() if any(key not in there for key, _ in _asked(entry))
            ]:
                del tensors[name]
                fresh.append((number, place, name))
    return fresh


def _begin_fresh(state: dict[Any, Any], optimizer: Any, fresh: Sequence[tuple[int, int, str]]) -> None:
    """Put in what was left out: moments of zero, and masters that are the weights, which are loaded by now."""
    parts = _parts(optimizer, state) if fresh else []
    for number, place, name in fresh:
        one, parameters = parts[number]
        buffers = one.buffers[: len(one.gbuf_ranges)]
        weight = [p for buffer in buffers for p in buffer.param_index_map][place].detach().float()
        master = name in ("param", "fp32_param")
        parameters.setdefault(place, {})[name] = weight if master else torch.zeros_like(weight)


def _shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a checkpoint."""
    from zoo.engine.megatron.safe_reading import SafeReader

    found = SafeReader(str(checkpoint)).read_metadata().state_dict_metadata
    return {name: tuple(entry.size) for name, entry in found.items() if hasattr(entry, "size")}


def _asked(entry: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the checkpoint's tensors that an entry of a wanted state stands for."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    found = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
    return [(one.key, tuple(one.global_shape)) for one in found if isinstance(one, ShardedTensor)]


def _refuse_other_shapes(wanted: dict[str, Any], checkpoint: Path) -> None:
    """UserError where a checkpoint lacks a tensor of the model's, or has it in another shape."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    there = _shapes(checkpoint)
    asked = [one for entry in nested_values(wanted) for one in _asked(entry)]
    wrong = [(name, shape) for name, shape in asked if there.get(name) != shape]
    if wrong:
        name, shape = wrong[0]
        what = f"has {list(there[name])}" if name in there else "has no such tensor"
        raise UserError(
            f"{checkpoint} does not hold this model: {len(wrong)} of {len(asked)} tensors are missing or of another shape, the "
            f"first {name}, wanted {list(shape)}, of which it {what}; take the recipe's old values, or start from its "
            f"weights with model.init={checkpoint} in another run.dir"
        )


def load_weights(chunks: Sequence[Any], checkpoint: Path, world: World) -> None:
    """Put a checkpoint's weights alone into model chunks, under whatever parallel layout either has."""
    refuse_faults(checkpoint)
    wanted = {f"model{i}": c.sharded_state_dict(metadata=_metadata(world)) for i, c in enumerate(chunks)}
    loaded = _load(wanted, checkpoint)
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{index}"], strict=True)


def load_adapters(adapters: Adapters, checkpoint: Path) -> None:
    """Put a checkpoint's adapters into those of a model, under whatever parallel layout either has."""
    refuse_faults(checkpoint)
    adapters.load(_load({"adapters": adapters.sharded()}, checkpoint)["adapters"])


def _load(wanted: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Raises UserError where a file is not what it should be, though its sum is right."""
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    from zoo.engine.megatron.safe_reading import SafeReader

    SafeReader(str(checkpoint)).read_metadata()  # torch only warns of what it raises
    _refuse_other_shapes(wanted, checkpoint)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(checkpoint))
    except CheckpointException as error:
        cause = next((one for one, _ in error.failures.values()), error)
        why = str(cause).partition("\n")[0]
        raise UserError(f"{checkpoint} can't be read: {why}; take another checkpoint") from error
    return loaded


def sharding() -> dict[str, Any]:
    """How megatron-core is to describe the state: so that it loads under other parallel sizes."""
    return {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def weights_of(trainable: Trainable, world: World) -> dict[str, Any]:
    """megatron-core's sharded state of the model chunks, or of the adapters alone where there are some."""
    if trainable.adapters is not None:
        return {"adapters": trainable.adapters.sharded()}
    return {
        f"model{i}": c.module.sharded_state_dict(metadata=_metadata(world))
        for i, c in enumerate(trainable.chunks)
    }


def _metadata(world: World) -> dict[str, Any]:
    return {**sharding(), "dp_cp_group": world.groups.dp_cp}


def _wanted(trainable: Trainable, world: World) -> dict[str, Any]:
    """What is to be loaded; the schedule comes along with megatron-core's common state."""
    parts = weights_of(trainable, world)
    everything = next(iter(parts.values())) if len(parts) == 1 else parts
    optimizer = trainable.optimizer.sharded_state_dict(everything, is_loading=True, metadata=_metadata(world))
    return {**parts, "optimizer": optimizer, "scheduler": trainable.scheduler.state_dict()}
