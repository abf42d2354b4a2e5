"""Adapters in the format that vLLM loads, out of PEFT's and back."""

from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.bridge.mapping.peft import tensor_names
from zoo.bridge.mapping.served import stored_as, to_vllm, vllm_config
from zoo.errors import UserError

EXPERTS, RANK, WIDTH, INNER = 3, 2, 5, 4
MODULE, PUBLISHED = "model.language_model.layers.1.mlp.experts", "language_model.model.layers.1.mlp.experts"
LINEAR = "model.language_model.layers.1.self_attn.q_proj"
GATE_UP, DOWN = f"{MODULE}.gate_up_proj", f"{MODULE}.down_proj"
SHAPES = {GATE_UP: (2 * INNER, WIDTH), DOWN: (WIDTH, INNER)}
PREFIX = "base_model.model."


def published(stacks: tuple[str, ...]) -> dict[str, str]:
    return {name: name.replace("model.language_model.", "language_model.model.") for name in (LINEAR, *stacks)}


def in_peft_format(stacks: tuple[str, ...]) -> dict[str, Tensor]:
    found = {}
    for name, (a, b) in zip((LINEAR, *stacks), tensor_names([LINEAR, *stacks], stacks), strict=True):
        height, width = SHAPES.get(name, (6, 5))
        times = EXPERTS if name in stacks else 1
        found |= {a: torch.randn(times * RANK, width), b: torch.randn(height, times * RANK)}
    return found


def change(pair: tuple[Tensor, Tensor], expert: int) -> Tensor:
    """What a stack's adapter in PEFT's format adds to an expert's weight, as PEFT has it."""
    a, b = pair
    return b.unflatten(1, (-1, EXPERTS))[..., expert] @ a.unflatten(0, (EXPERTS, -1))[expert]


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("stacks", [(GATE_UP, DOWN), (GATE_UP,), (DOWN,), ()])
def test_there_and_back_to_the_bit(stacks: tuple[str, ...], stacked: bool) -> None:
    tensors, names = in_peft_format(stacks), published(stacks)
    served = to_vllm(tensors, names, stacks, EXPERTS, stacked=stacked)
    assert all(name.startswith(f"{PREFIX}language_model.model.layers.1.") for name in served)
    for file in (served, tensors):
        stored, zeros = stored_as({name: tuple(tensor.shape) for name, tensor in file.items()}, names, stacks)
        assert stored.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert stored[name].shape == tensor.shape
            joined = stored[name].join([file[part] for part in stored[name].names])
            torch.testing.assert_close(joined, tensor, rtol=0, atol=0)
        assert not any(file[name].any() for name in zeros)
        assert bool(zeros) == (len(stacks) == 1 and file is served)


@pytest.mark.parametrize("stacks", [(GATE_UP, DOWN), (GATE_UP,), (DOWN,)])
def test_each_expert_has_its_own_three_pairs(stacks: tuple[str, ...]) -> None:
    tensors = in_peft_format(stacks)
    served = to_vllm(tensors, published(stacks), stacks, EXPERTS, stacked=False)
    pairs = {name: (tensors[a], tensors[b]) for name, (a, b) in zip(stacks, tensor_names(stacks, stacks), strict=True)}
    assert sum(".experts." in name for name in served) == EXPERTS * 3 * 2
    for expert in range(EXPERTS):
        changes = {
            projection: served[f"{PREFIX}{PUBLISHED}.{expert}.{projection}.lora_B.weight"]
            @ served[f"{PREFIX}{PUBLISHED}.{expert}.{projection}.lora_A.weight"]
            for projection in ("gate_proj", "up_proj", "down_proj")
        }
        both = torch.cat([changes["gate_proj"], changes["up_proj"]])
        zeros = {name: torch.zeros(SHAPES[name]) for name in SHAPES}
        wanted = zeros | {name: change(pair, expert) for name, pair in pairs.items()}
        torch.testing.assert_close(both, wanted[GATE_UP])
        torch.testing.assert_close(changes["down_proj"], wanted[DOWN])


@pytest.mark.parametrize("stacks", [(GATE_UP, DOWN), (GATE_UP,), (DOWN,)])
def test_stacks_are_two_in_every_module(stacks: tuple[str, ...]) -> None:
    served = to_vllm(in_peft_format(stacks), published(stacks), stacks, EXPERTS, stacked=True)
    wrapped = {f"{PREFIX}{PUBLISHED}.base_layer": SHAPES[GATE_UP], f"{PREFIX}{PUBLISHED}": SHAPES[DOWN]}
    for name, (height, width) in wrapped.items():
        assert served[f"{name}.lora_A.weight"].shape == (EXPERTS * RANK, width)
        assert served[f"{name}.lora_B.weight"].shape == (height, EXPERTS * RANK)


@pytest.mark.parametrize("stacked", [True, False])
def test_the_config_names_what_is_there(stacked: bool) -> None:
    stacks = (DOWN,)
    shared = "model.language_model.layers.1.mlp.shared_expert.up_proj"
    config: dict[str, Any] = {"r": 2, "target_modules": [LINEAR], "target_parameters": [DOWN, f"{shared}.weight"]}
    names = published(stacks) | {shared: shared.replace("model.language_model.", "language_model.model.")}
    made = vllm_config(config, names, stacks, stacked=stacked)
    stacks_there = [f"{PUBLISHED}.down_proj", f"{PUBLISHED}.gate_up_proj"] if stacked else []
    singles = [] if stacked else ["experts.down_proj", "experts.gate_proj", "experts.up_proj"]
    assert made["target_parameters"] == [*stacks_there, f"{names[shared]}.weight"]
    assert made["target_modules"] == sorted([*singles, names[LINEAR]])
    assert made["r"] == 2


def test_what_zoo_has_no_adapters_for_is_said() -> None:
    """Experts whose gate and up have been trained apart; one that is not there; others keep their names, which the report lists."""
    stacks = (GATE_UP, DOWN)
    served = to_vllm(in_peft_format(stacks), published(stacks), stacks, EXPERTS, stacked=False)
    gate, up = (f"{PREFIX}{PUBLISHED}.1.{projection}_proj.lora_A.weight" for projection in ("gate", "up"))
    apart = served | {up: served[gate] + 1}
    shapes = {name: tuple(tensor.shape) for name, tensor in served.items()}
    stored, _ = stored_as(shapes, published(stacks), stacks)
    name = tensor_names([GATE_UP], stacks)[0][0]
    with pytest.raises(UserError, match=r"gate_proj and up_proj have a lora_A each, where zoo's adapters .* share one"):
        stored[name].join([apart[part] for part in stored[name].names])
    del shapes[up]
    stored, _ = stored_as(shapes, published(stacks), stacks)
    assert name not in stored and gate in stored
