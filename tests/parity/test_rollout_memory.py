"""What a plan counts for the cache of sampled answers, against the tensors that generation keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.answers import ask

from zoo.generation import decoding
from zoo.nn.decoder.attention.cache import DecodeCache
from zoo.nn.flops import layer_kinds
from zoo.planner.rollouts import layer_bytes


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen35_vl", "gemma4"])
def test_bytes_of_the_cache_are_those_counted(
    name: str, tmp_path: Path, cpu_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[DecodeCache] = []

    def noted(*arguments: int) -> DecodeCache:
        caches.append(DecodeCache(*arguments))
        return caches[-1]

    monkeypatch.setattr(decoding, "DecodeCache", noted)
    asked = ask(name, tmp_path, cpu_world)
    asked.found()
    (cache,) = caches
    stores: list[dict[int, torch.Tensor]] = [cache._keys, cache._values, cache._inputs, cache._states]
    held = sum(tensor.nbytes for store in stores for tensor in store.values())
    text = asked.zoo.assembly.config.text
    counted = sum(layer_bytes(text, asked.zoo.recipe, kind, cache.capacity, 4) for kind in layer_kinds(text))
    assert cache.sequences * counted == held
