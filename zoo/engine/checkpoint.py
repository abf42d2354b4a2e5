"""Checkpoints to resume from: `checkpoints/iter_N/` in the run folder, sharded, published whole or not at all.

Weights and optimizer state go through megatron-core's dist_checkpointing; step, data position, schedule and the
model's description lie beside them in `state.json`. A folder is written under another name and renamed when
every rank is done; `latest` is the folder with the highest step.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zoo.config.locate import BASE, HF_PART, STATE, Place, checkpoints, locate, look
from zoo.config.schema import Recipe
from zoo.engine import compat
from zoo.engine.lora import Adapters, settings_of
from zoo.engine.world import World
from zoo.errors import UserError
from zoo.files import write_atomically


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


def save(
    trainable: Trainable,
    folder: Path,
    state: dict[str, Any],
    world: World,
    keep: int,
    beside: Callable[[Path], None],
) -> Path:
    """Write `folder`/iter_N with N = state["step"], then drop all but the `keep` newest.

    `beside` writes config.json and the processor's files into a folder that it is given.
    """
    from megatron.core import dist_checkpointing

    target = folder / f"iter_{state['step']}"
    partial = folder / f".partial-{target.name}"
    if world.is_main:
        for left in folder.glob(".partial-*"):  # of a save that was killed
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metadata = _metadata(world)
        dist_checkpointing.save(_sharded(trainable, metadata, False), str(partial), content_metadata=metadata)
    dist.barrier()
    if world.is_main:
        (partial / HF_PART).mkdir()
        beside(partial / HF_PART)
        write_atomically(partial / STATE, json.dumps(state) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        for old in checkpoints(folder.parent)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    return target


def load(trainable: Trainable, checkpoint: Path, world: World) -> None:
    """Put a checkpoint's weights, optimizer state and schedule into what was built for this run."""
    from megatron.core import dist_checkpointing

    compat.allocate_optimizer_state(trainable.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = dist_checkpointing.load(_sharded(trainable, _metadata(world), True), str(checkpoint))
    if trainable.adapters is not None:
        trainable.adapters.load(loaded["adapters"])
    else:
        for index, chunk in enumerate(trainable.chunks):
            chunk.module.load_state_dict(loaded[f"model{index}"], strict=True)
    step = loaded["scheduler"]["num_steps"]
    compat.load_optimizer_state(trainable.optimizer, loaded["optimizer"], step)
    trainable.scheduler.load_state_dict(loaded["scheduler"])


def load_weights(chunks: Sequence[Any], checkpoint: Path, world: World) -> None:
    """Put a checkpoint's weights alone into model chunks, under whatever parallel layout either has."""
    from megatron.core import dist_checkpointing

    wanted = {f"model{i}": c.sharded_state_dict(metadata=_metadata(world)) for i, c in enumerate(chunks)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = dist_checkpointing.load(wanted, str(checkpoint))
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{index}"], strict=True)


def load_adapters(adapters: Adapters, checkpoint: Path) -> None:
    """Put a checkpoint's adapters into those of a model, under whatever parallel layout either has."""
    from megatron.core import dist_checkpointing

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = dist_checkpointing.load({"adapters": adapters.sharded()}, str(checkpoint))
    adapters.load(loaded["adapters"])


def _metadata(world: World) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,  # so that a checkpoint loads under other parallel sizes
        "dp_cp_group": world.groups.dp_cp,
    }


def _sharded(trainable: Trainable, metadata: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    if trainable.adapters is not None:
        parts = {"adapters": trainable.adapters.sharded()}
    else:
        parts = {
            f"model{i}": c.module.sharded_state_dict(metadata=metadata)
            for i, c in enumerate(trainable.chunks)
        }
    everything = next(iter(parts.values())) if len(parts) == 1 else parts
    optimizer = trainable.optimizer.sharded_state_dict(everything, is_loading=is_loading, metadata=metadata)
    return {**parts, "optimizer": optimizer, "scheduler": trainable.scheduler.state_dict()}
