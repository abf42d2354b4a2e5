"""Checkpoints to resume from: `checkpoints/iter_N/` in the run folder, sharded, published whole or not at all.

Weights, optimizer state, schedule and random states are in megatron-core's torch_dist format; step, data position and
the model's description lie beside them in `state.json`. This file reads them; `zoo.engine.saving` writes them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.config.locate import BASE, STATE, Place, locate, look
from zoo.config.schema import Recipe
from zoo.engine import compat
from zoo.engine.lora import Adapters, settings_of
from zoo.engine.saving.choose import refuse_faults
from zoo.engine.saving.random_state import set_random_state
from zoo.engine.world import World
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


def read_state(checkpoint: Path, model: dict[str, Any]) -> dict[str, Any]:
    """`state.json` of a checkpoint; raises UserError when it is another model's."""
    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    different = list(_differences(state["model"], model))
    if different:
        shown = "; ".join(f"{key}: {theirs!r} there, {ours!r} here" for key, theirs, ours in different[:4])
        raise UserError(
            f"{checkpoint} is a checkpoint of another model ({shown}); "
            "use another run.dir, or move that folder away to start anew"
        )
    return state


def _differences(theirs: Any, ours: Any, prefix: str = "") -> Any:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in sorted({*theirs, *ours}):
            yield from _differences(
                theirs.get(key), ours.get(key), f"{prefix}{key}." if prefix or key else key
            )
    elif theirs != ours:
        yield prefix.rstrip("."), theirs, ours


def load(trainable: Trainable, checkpoint: Path, world: World, ranks: int) -> None:
    """Put a checkpoint's weights, optimizer state and schedule into what was built for this run.

    The random generators go on from their states where it was written by so many `ranks` as there are now.
    """
    from megatron.core.dist_checkpointing import ShardedObject

    compat.allocate_optimizer_state(trainable.optimizer)
    wanted = _wanted(trainable, world)
    if ranks == world.size:
        wanted["random"] = ShardedObject("random", None, (world.size,), (world.rank,), replica_id=0)
    loaded = _load(wanted, checkpoint)
    if trainable.adapters is not None:
        trainable.adapters.load(loaded["adapters"])
    else:
        for index, chunk in enumerate(trainable.chunks):
            chunk.module.load_state_dict(loaded[f"model{index}"], strict=True)
    step = loaded["scheduler"]["num_steps"]
    compat.load_optimizer_state(trainable.optimizer, loaded["optimizer"], step)
    trainable.scheduler.load_state_dict(loaded["scheduler"])
    if "random" in loaded:
        set_random_state(loaded["random"])


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

    from zoo.engine.saving.safe import SafeReader

    SafeReader(str(checkpoint)).read_metadata()  # torch only warns of what it raises
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
