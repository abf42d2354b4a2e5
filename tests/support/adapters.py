"""Adapters for tests: with a B that is not zero, and how ranks share them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

WHOLE_EXPERTS = "experts"  # a stack of experts, of which expert tensor parallelism cuts nothing


def adapt(chunks: list[Any], assembly: Any, recipe: Any, world: Any) -> Any:
    """New adapters (zoo.model.lora.Adapters), B random, the same under any parallel layout; what is trained whole is changed."""
    from zoo.checkpoint import initial_weights

    adapters = initial_weights.attach_adapters(chunks, assembly, recipe, world)
    for one in adapters.held:
        shape, rank = adapters.full_shape(one), one.target.rank
        stacked = one.target.stacked
        experts = shape[:1] if stacked else ()
        parts = 1 if stacked else len(one.target.named)
        generator = torch.Generator().manual_seed(zlib.crc32(one.target.zoo.encode()))
        a = torch.randn(*experts, parts * rank, shape[-1], generator=generator) * 0.6 * shape[-1] ** -0.5
        b = torch.randn(*shape[:-1], rank, generator=generator) * 0.2
        if not stacked:  # rows of parts without an adapter are zero, as they are when they have been trained
            b[one.target.owner(shape, adapters.dims) < 0] = 0.0
        for part, own in enumerate([] if stacked else one.target.ranks):  # zeros fill up a lower rank
            a[part * rank + own : (part + 1) * rank] = 0.0
            b[one.target.owner(shape, adapters.dims) == part, own:] = 0.0
        adapters.fill(one, a=a, b=b)
        if adapters.dora:
            factor = torch.rand(shape[0], generator=generator) + 0.5
            adapters.fill(one, m=factor)
            with torch.no_grad():
                one.adapter.m *= one.adapter.norm(one.weight)
    with torch.no_grad():
        for name, parameter in adapters.whole.trained.items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            scale = 0.3 * float(parameter.float().pow(2).mean().sqrt()) + 0.02
            parameter += scale * torch.randn(parameter.shape, generator=generator).to(parameter)
    return adapters


def published_gradients(adapters: Any, gradients: Mapping[str, Tensor], names: Mapping[int, str]) -> dict[str, Tensor]:
    """Gradients of adapters and a head by the names that peft's own parameters have; the adapters hold them afterwards.

    `names`: by the id of a parameter, its name among `gradients`.
    """
    from zoo.checkpoint import lora_files

    adapters.load({name: gradients[names[id(one)]] for name, one in adapters.named().items()})
    return dict(lora_files.gathered(adapters))


def peft_gradients(hf: Any) -> dict[str, Tensor]:
    """Those of a peft model's trained parameters, by the names of its own checkpoints."""
    drop = (".default", ".modules_to_save")
    found = {}
    for name, parameter in hf.named_parameters():
        if parameter.requires_grad:
            for part in drop:
                name = name.replace(part, "")
            name = name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
            found[name] = parameter.grad
    return found


def adapter_shards(adapters: Any) -> dict[str, Any]:
    """How each parameter is cut, as `support.gathered` joins it."""
    found = {}
    for one in adapters.held:
        how = one.target.entry.rule.shard_for(adapters.dims)
        for name in one.adapter.cuts:
            is_cut = one.adapter.cuts[name].axis is not None
            whole = WHOLE_EXPERTS if one.target.stacked else None
            found[f"{one.target.zoo}.lora.{name}"] = how if is_cut else whole
    return found | dict.fromkeys(adapters.whole.trained)
