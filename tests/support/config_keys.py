"""Tiny configs of every kind of model that a family takes, what zoo makes of one, and transformers' models of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from support import tiny_qwen35
from support.families import FAMILIES, Family
from zoo.packing import PackedLayout

Arch = dict[str, Any]

CASES: dict[str, Family] = {
    "qwen3_vl": FAMILIES["qwen3_vl"],
    "qwen3_vl_moe": FAMILIES["qwen3_vl experts"],
    "qwen2_5_vl": FAMILIES["qwen25_vl"],
    "qwen3_5": FAMILIES["qwen35_vl"].sized(mtp=1),
    "qwen3_5_moe": FAMILIES["qwen35_vl experts"].sized(mtp=1),
    "qwen3_5_text": FAMILIES["qwen35_text"].sized(mtp=1),
    "qwen3_5_moe_text": FAMILIES["qwen35_text experts"].sized(mtp=1),
    "qwen3_omni_moe_thinker": FAMILIES["qwen3_omni"],
    "qwen2_5_omni_thinker": FAMILIES["qwen25_omni"],
    "glm4v_moe": FAMILIES["glm45v"],
    "qwen3_moe": FAMILIES["qwen3 experts"],
    "internvl with experts": FAMILIES["internvl experts"],
    **{
        name: FAMILIES[name]
        for name in (
            *("qwen3_asr", "gemma3", "gemma3_text", "gemma4", "llava", "llava_next", "llava_onevision", "qwen3"),
            *("qwen3_next", "internvl"),
        )
    },
}
PARTS = ("", "text_config", "vision_config", "audio_config")


def tiny_arch(case: str) -> Arch:
    """The dict of a config.json of that case."""
    return {**CASES[case].config().to_dict(), "architectures": [CASES[case].kind]}


def config_class(case: str, part: str) -> Any:
    """transformers' config class of a part ("" for the whole)."""
    from transformers import CONFIG_MAPPING

    arch = tiny_arch(case)
    whole = CONFIG_MAPPING[arch["model_type"]].from_dict(copy.deepcopy(arch))
    return type(getattr(whole, part) if part else whole)


def has_part(case: str, part: str) -> bool:
    return not part or tiny_arch(case).get(part) is not None


def text_part(case: str) -> str:
    """Where the decoder's keys are: "" for the whole."""
    return "text_config" if has_part(case, "text_config") else ""


def keys(case: str, part: str) -> Iterator[tuple[str, Any]]:
    """Every key of a part's class with the value it has in the tiny config."""
    arch = tiny_arch(case)
    values = arch[part] if part else arch
    for field in dataclasses.fields(config_class(case, part)):
        yield field.name, values.get(field.name)


def changed(arch: Arch, part: str, key: str, value: Any) -> Arch:
    """The arch with another value; of a key with a second name, that name goes."""
    arch = copy.deepcopy(arch)
    place = arch[part] if part else arch
    media = ({f"{kind}_token_id", f"{kind}_token_index"} for kind in ("image", "video", "audio"))
    for alias in ({"num_experts", "num_local_experts", "n_routed_experts"}, *media):
        for name in alias if key in alias else ():
            place.pop(name, None)
    place[key] = value
    return arch


def made_of(case: str, arch: Arch) -> dict[str, Any]:
    """What zoo makes of an arch, as values to compare; UserError where it refuses it."""
    from transformers import PreTrainedConfig

    from zoo.config.schema import PackingConfig, Recipe
    from zoo.nn.decoder.config import full_heads, transformer_config
    from zoo.registry import get_family

    family = get_family(CASES[case].name)
    # transformers writes whole configs into messages that it then drops, which would be nine tenths of the time.
    with patch.object(PreTrainedConfig, "__repr__", object.__repr__):
        config = family.load("config").from_arch(copy.deepcopy(arch))
    recipe = Recipe(packing=PackingConfig(budget=256))
    traits = dict.fromkeys(config.traits, True)
    decoder = transformer_config(config.text, recipe, mtp_layers=config.mtp_layers(recipe), **traits)
    plain = {k: v for k, v in vars(decoder).items() if isinstance(v, int | float | str | list | None)}
    found: dict[str, Any] = {f"decoder.{k}": v for k, v in plain.items()}
    found |= {"local rotary": config.local_rotary, "window": decoder.window_size}
    found |= {"activation": decoder.activation_func, "softmax scale": decoder.softmax_scale}
    found |= {"rotary": config.rotary, "tied": config.tied, "vocabulary": config.text.vocab_size}
    found |= {"embedding scale": config.embedding_scale, "logit softcap": config.logit_softcap}
    found |= {"full heads": full_heads(config.text)}
    found |= {"deepstack": config.deepstack_layers, "std": config.text.initializer_range}
    found |= {"costs": config.tower_costs(), "step": _step(family, config)}
    if hasattr(config, "tiling"):
        found |= {"tiling": config.tiling, "layers": config.feature_layers}
    for name, tower in _towers(family, config).items():
        found |= {f"{name}.{k}": v for k, v in _described(tower)}
    return found


def _step(family: Any, config: Any) -> list[Any]:
    """What the step reads of a config: placeholders' ids and the clock."""
    step = object.__new__(family.load("step"))
    step.config = config
    read = [step.tower_tokens()]
    read.append(step.bidirectional_tokens(torch.tensor([[373, 11]])) is None)
    if hasattr(step, "_tokens"):
        read.append(step._tokens())
    if hasattr(config.root, "video_start_token_id"):  # by which frames are told from images
        ids = torch.tensor([[390, 373, 391, 373]])
        read.append(step.expand(PackedLayout.from_lengths([4]), ids, ids, ids, {})[1].tolist())
    if hasattr(config.vision, "tokens_per_second"):
        ids = torch.tensor([[config.root.video_token_id] * 2])
        grid = torch.tensor([[2, config.vision.spatial_merge_size, config.vision.spatial_merge_size]])
        placed = step.positions(ids, PackedLayout.from_lengths([2]), {"video_grid_thw": grid})
        read.append(placed.tolist())
    return read


def _towers(family: Any, config: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return family.load("model").build_towers(None, config)


def _described(tower: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules as they print and with their plain attributes, tensors by shape and sum (initial weights under one seed)."""
    yield "printed", repr(tower)
    for name, module in tower.named_modules():
        for key, value in vars(module).items():
            # Into how many calls transformers cuts a layer; the audio tower here takes all chunks at once.
            if isinstance(value, int | float | str | tuple | list) and key not in (
                "training",
                "conv_chunksize",
                "chunk_size_feed_forward",
            ):
                yield f"{name}.{key}", value
    for name, tensor in [*tower.named_parameters(), *tower.named_buffers()]:
        yield f"{name}!", (tensor.dtype, tuple(tensor.shape), float(tensor.detach().double().sum()))


def plain_model(case: str, arch: Arch) -> Any:
    """transformers' model of an arch, its weights random but the same for each of those shapes."""
    import transformers
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[arch["model_type"]].from_dict(copy.deepcopy(arch))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = getattr(transformers, CASES[case].kind)(config).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        tiny_qwen35.randomise(name, parameter)
    return model


@torch.no_grad()
def plain_logits(case: str, arch: Arch) -> Tensor:
    """(1, 24, vocab) of transformers' model for a text."""
    ids = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(2))
    return plain_model(case, arch)(input_ids=ids, use_cache=False).logits
