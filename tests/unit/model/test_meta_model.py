from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.config_keys import CASES, tiny_arch

from zoo.bridge.mapping.table import VOCABULARY
from zoo.config.compose import load_recipe
from zoo.model.meta_model import build_meta_model, on_meta
from zoo.parallel.megatron import cpu_host
from zoo.parallel.world import World


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with cpu_host.redirected():
        yield


@pytest.mark.parametrize("recipe", ["qwen3_vl_sft", "qwen35_vl_moe_sft"])
def test_a_gpus_generator_is_not_looked_up_by_a_device_without_data(
    recipe: str, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.tensor_parallel import random

    def set_state(state: Any, *args: Any, **how: Any) -> None:
        if torch.cuda.current_device() == torch.device("meta"):
            raise TypeError("tuple indices must be integers or slices, not torch.device")  # as with a GPU

    monkeypatch.setattr(random, "_set_cuda_rng_state", set_state)
    parameters = build_meta_model(load_recipe(recipe, ["hardware=cpu"]).model.arch).parameters
    assert parameters and all(tensor.is_meta for tensor in parameters.values())


def test_triton_looks_for_its_driver_before_the_current_device_is_meta(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps what it finds: a library that asks for it while a model is built would leave kernels without a device."""
    found = []

    class Driver:
        @property
        def active(self) -> Any:
            found.append(torch.cuda.current_device)
            raise RuntimeError("0 active drivers")

    import triton.runtime

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton.runtime, "driver", Driver())
    before = torch.cuda.current_device
    with on_meta(World(0, 1, torch.device("cpu"), 0, 1, 0, 0, 0, 1, None)):
        assert torch.cuda.current_device is not before
    assert found == [before]


def test_every_inner_part_has_parameters_of_a_part() -> None:
    """As transformers names them: a prefix that no parameter has would make a part of nothing."""
    seen = {}
    for case in CASES:
        model = build_meta_model(tiny_arch(case))
        for part, prefixes in model.family.inner.items():
            assert model.family.within(part) in model.family.parts
            found = [prefix for prefix in prefixes if any(name.startswith(prefix) for name in model.parameters)]
            assert found == list(prefixes), (case, part)
            seen[model.family.name, part] = found
        merging = [name for name in model.parameters if "merger" in name]
        assert all(model.family.part_of(name, {"merger"}) == "merger" for name in merging)
    assert len(seen) == 8


@pytest.mark.parametrize("case", CASES)
def test_a_config_with_another_vocabulary_differs_in_that_alone(case: str) -> None:
    model = build_meta_model(tiny_arch(case))
    grown = model.config.with_vocabulary(401)
    assert grown.text.vocab_size == 401 != model.config.text.vocab_size
    shapes = {name: tuple(one.shape) for name, one in model.parameters.items()}
    again = build_meta_model(grown.hf.to_dict())
    other = {name for name, one in again.parameters.items() if tuple(one.shape) != shapes[name]}
    assert again.dims.vocabulary == 401 and other <= set(VOCABULARY) and other
