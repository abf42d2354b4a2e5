"""Checks of the model's keys against its family: frozen parts, learning rates of parts, weights, adapters."""

from __future__ import annotations

from zoo.config.derived import trained_parts
from zoo.config.layers.keys import nearest
from zoo.config.locate import is_hub_id
from zoo.config.schema import Recipe
from zoo.errors import ConfigError
from zoo.files import expanded
from zoo.registry import ModelFamily, get_family


def check_model(recipe: Recipe) -> None:
    if not recipe.model.family:
        raise ConfigError("model.family is not set; `zoo list` shows the families")
    family = get_family(recipe.model.family)
    for part in recipe.model.freeze:
        _check_part(family, part, f"model.freeze={part}")
    for part, scale in recipe.train.lr_scale.items():
        _check_part(family, part, f"train.lr_scale.{part}")
        if part in recipe.model.freeze:
            raise ConfigError(f"train.lr_scale.{part}: model.freeze has {part} too; take it out of one of the two")
        if not scale > 0:
            raise ConfigError(f"train.lr_scale.{part}={scale:g}: wanted a number above 0; model.freeze stops a part")
    if not trained_parts(recipe):
        raise ConfigError(
            f"model.freeze={','.join(recipe.model.freeze)}: nothing would be left to train; leave a part out"
        )
    init = recipe.model.init
    if init != "random" and not is_hub_id(init) and not expanded(init).exists():
        raise ConfigError(f"model.init={init}: no such folder; wanted random, a checkpoint folder or a hub id")
    if recipe.model.resize_embeddings and init == "random":
        raise ConfigError(
            "model.resize_embeddings=true with model.init=random: random weights have as many rows as vocab_size of model.arch "
            "says; set that, and leave model.resize_embeddings out"
        )
    if recipe.model.resize_embeddings and recipe.lora.rank:
        raise ConfigError(
            f"model.resize_embeddings=true with lora.rank={recipe.lora.rank}: adapters leave new rows as they are, and PEFT's base "
            "weights lack them; train all weights, or add the rows first (resize_token_embeddings and save_pretrained of "
            "transformers) and start from that folder"
        )
    if init == "random" and not recipe.model.arch:
        raise ConfigError("model.arch is empty and model.init=random: give size=, or model.init=<folder>")


def check_lora(recipe: Recipe) -> None:
    lora = recipe.lora
    folders = {"lora.init": lora.init, "lora.merge_first": lora.merge_first}
    if not lora.rank:
        if lora.base_dtype != "model":
            raise ConfigError(
                f"lora.base_dtype={lora.base_dtype} with lora.rank=0: weights that are trained are not held so; set lora.rank, or "
                f"leave lora.base_dtype out"
            )
        for key, folder in folders.items():
            if folder is not None:
                raise ConfigError(f"{key}={folder} with lora.rank=0: no adapter is trained; set lora.rank")
        return
    for key, values in (("lora.targets", lora.targets), ("lora.parts", lora.parts)):
        if not values:
            raise ConfigError(f"{key}=[]: no linear would have an adapter; leave {key} out for its default")
    _check_lora_parts(recipe)
    if lora.dora and (experts := [name for name in lora.targets if name.startswith("experts.")]):
        raise ConfigError(
            f"lora.dora=true: experts have none, and lora.targets has {', '.join(experts)}; name other linears there, "
            "lora.targets=[q_proj,k_proj,v_proj,o_proj] say"
        )
    if lora.base_dtype != "model" and (recipe.engine.backend == "te" or recipe.engine.fp8):
        raise ConfigError(
            f"lora.base_dtype={lora.base_dtype} with engine.backend={recipe.engine.backend}, engine.fp8={str(recipe.engine.fp8).lower()}: "
            f"Transformer Engine's linears and those in FP8 want dense weights; set engine.backend=torch and leave engine.fp8 out"
        )
    for key, folder in folders.items():
        if folder is not None and not (expanded(folder) / "adapter_config.json").is_file():
            raise ConfigError(f"{key}={folder}: no adapter_config.json there; wanted an adapter's folder")


def _check_part(family: ModelFamily, part: str, where: str) -> None:
    if part not in family.all_parts:
        near = ", ".join(nearest(part, list(family.all_parts)))
        raise ConfigError(f"{where}: {family.name} has no such part; nearest: {near}")


def _check_lora_parts(recipe: Recipe) -> None:
    """Which parts have adapters, and which are trained whole beside them."""
    lora, family = recipe.lora, get_family(recipe.model.family)
    for key, parts in (("lora.parts", lora.parts), ("lora.whole_parts", lora.whole_parts)):
        for part in parts:
            _check_part(family, part, f"{key}={part}")
            if part in recipe.model.freeze:
                raise ConfigError(f"{key}={part}: model.freeze has {part} too; take it out of one of the two")
    for part in lora.whole_parts:
        if part in lora.parts:
            raise ConfigError(
                f"lora.whole_parts={part}: lora.parts has {part} too, and a part is trained whole or by adapters; take it out of one of "
                "the two"
            )
        if part == "language":
            raise ConfigError(
                "lora.whole_parts=language: a language model that is trained whole leaves nothing to adapters; set lora.rank=0, and "
                "stop other parts with model.freeze or slow them with train.lr_scale"
            )
    for part in recipe.train.lr_scale:
        if part not in (*lora.parts, *lora.whole_parts):
            raise ConfigError(
                f"train.lr_scale.{part}: neither lora.parts nor lora.whole_parts has {part}, which is not trained then"
            )
