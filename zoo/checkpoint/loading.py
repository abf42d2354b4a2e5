"""Checkpoints to resume from: `checkpoints/iter_N/` in the run folder, sharded, published whole or not at all.

Tensors and random states lie in files of their own, `index.json` says where; step, data position, schedule and the
model's description lie beside them in `state.json`. This file reads them; `zoo.checkpoint.writer` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.checkpoint.integrity import block_checksums
from zoo.checkpoint.selection import faults, together
from zoo.checkpoint.sharded_state import Trainable, load_objects, load_optimizer, load_random_state, weights_wanted
from zoo.checkpoint.storage.disk import Damaged
from zoo.checkpoint.storage.index import Index
from zoo.checkpoint.storage.reading import fill
from zoo.config.locate import BASE, STATE, Place, locate, look, read_origin, read_state
from zoo.config.schema import LoraConfig, Recipe
from zoo.errors import UserError
from zoo.logging import terminal
from zoo.model.lora import Adapters, settings_of
from zoo.parallel.weight_gathering import settle_all
from zoo.parallel.world import World
from zoo.records import reading_back
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule
    from transformers import PretrainedConfig


def describe(recipe: Recipe, hf_config: PretrainedConfig) -> JsonObject:
    """What two runs must share to share checkpoints: family, architecture, adapters."""
    arch = json.loads(hf_config.to_json_string(use_diff=False))
    for key in ("_name_or_path", "transformers_version", "dtype", "architectures"):
        arch.pop(key, None)
    adapters = {"lora": settings_of(recipe)} if recipe.lora.rank else {}
    return {"family": recipe.model.family, "arch": arch, **adapters}


def origin(recipe: Recipe, source: Place | None, fp32: Sequence[str]) -> JsonObject:
    """What else an export of a checkpoint needs to know: where tensors that are not trained lie, and what was built.

    Args:
        source: what the weights came from, as the run's `Assembly` has it.
        fp32: parameters that a model in half precision holds in fp32, as the `Assembly` has them.
    """
    init = recipe.model.init
    folder = look(init)
    return {
        "init": str(folder.folder.absolute()) if folder else init,
        "mtp_loss": recipe.train.mtp_loss,
        "speech_loss": recipe.train.speech_loss,
        **({"grown_from": source.grown_from} if source is not None and source.grown_from else {}),
        "fp32": list(fp32),
        **({"freeze": list(recipe.model.freeze)} if recipe.lora.rank or recipe.train.speech_loss else {}),
        **({"lora": settings_of(recipe)} if recipe.lora.rank else {}),
    }


def with_adapters_of(recipe: Recipe, weights: JsonMapping) -> Recipe:
    """The recipe with a checkpoint's adapters (`weights`: its `origin`), whatever parts of the model the recipe itself names."""
    train = replace(recipe.train, lr_scale={})
    model = replace(recipe.model, freeze=list(weights.get("freeze", ())))
    plain = replace(recipe, lora=LoraConfig(), model=model, train=train)
    return plain.replace({"lora": weights["lora"]})


def started_from(run: Place) -> Place | None:
    """Where the weights come from that a run started from, None for random ones; of adapters, what they belong to."""
    saved, base = read_origin(run.folder), run.folder.parent.parent / BASE
    if "lora" in saved and (base / "config.json").is_file():
        return locate(str(base))
    if "lora" in saved and saved["init"] == "random":
        raise UserError(f"{run.folder} holds adapters, and what they belong to is not in {base}; put it back")
    if saved["init"] == "random":
        return None
    source = locate(saved["init"], key=f"{run.folder / STATE}: init")
    return replace(source, grown_from=saved.get("grown_from", 0))


def load(trainable: Trainable, checkpoint: Path, world: World, ranks: int) -> None:
    """Put a checkpoint's weights, optimizer state and schedule into what was built for this run.

    The random generators go on from their states where it was written by so many `ranks` as there are now.

    Raises:
        Damaged: on all ranks, where any has read what was not written; what was built holds some of it.
    """
    terminal.set_status("loading the checkpoint")
    with together():
        index = Index(checkpoint, block_checksums(checkpoint))
        state = read_state(checkpoint)
        with reading_back(checkpoint / STATE, "take another checkpoint"):
            schedule = state["scheduler"]
            updates = updates_of(state, schedule["num_steps"])
        fill(weights_wanted(trainable.modules, trainable.adapters, world), index, direct=world.size == 1)
        load_optimizer(trainable, world, index, updates)
        if trainable.adapters is None:
            load_objects(trainable.modules, index, world)
        trainable.scheduler.num_steps = 0  # megatron-core's adds those that it loads
        with reading_back(checkpoint / STATE, "take another checkpoint"):
            trainable.scheduler.load_state_dict(schedule)
        if ranks == world.size:
            load_random_state(index, world)
    for each in trainable.optimizers:  # fp32 weights that masters have completed go to the ranks that hold them, too
        each.optimizer.send_shared()
        each.start_param_sync_for_bucket_group_subset()
    settle_all()


def updates_of(state: JsonMapping, scheduled: int) -> int:
    """Updates that a checkpoint's optimizer state has seen: `scheduled`, but in a loop that moves the schedule by itself."""
    return int(state.get("updates", scheduled))


def open_weights(checkpoint: Path) -> Index:
    """The tensors of a checkpoint whose files are there; each block is checked when it is read. Raises Damaged where some are not."""
    if damage := faults(checkpoint, read=False):
        raise Damaged(damage)
    return Index(checkpoint, block_checksums(checkpoint))


def load_weights(
    chunks: Sequence[MegatronModule], checkpoint: Path, world: World, without: Collection[str] = ()
) -> None:
    """Put only a checkpoint's weights into model chunks, under whatever parallel layout either has; tensors `without` stay."""
    index = open_weights(checkpoint)
    with together():
        wanted = [piece for piece in weights_wanted(chunks, None, world) if piece.key not in without]
        fill(wanted, index, direct=world.size == 1)
        load_objects(chunks, index, world)


def load_adapters(adapters: Adapters, checkpoint: Path, world: World) -> None:
    """Put a checkpoint's adapters into those of a model, under whatever parallel layout either has."""
    index = open_weights(checkpoint)
    with together():
        fill(weights_wanted([], adapters, world), index)
