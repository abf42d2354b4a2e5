"""Layers as CUDA graphs against the same layers launched one by one: loss and every gradient, for rows of several sizes in turn."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import adapt
from support.engine import Zoo, packed_batch, single_process_world
from support.families import FAMILIES
from support.on_gpu import ON_GPU
from support.stacks import STACKS
from torch import Tensor

# Without a GPU there are no graphs; tests/parity/test_graphs.py does the recorded work again on the CPU.
pytestmark = pytest.mark.skipif(not ON_GPU, reason="CUDA graphs are a GPU's")
# How many stacks of a model are captured: decoders without experts, and vision towers of Qwen's and GLM's kind. No kernel takes heads of 18 or 20,
# nor the widths of the delta rule of `qwen35_vl odd`.
STACKS_CAPTURED = {
    "qwen3_vl": 2, "qwen35_vl": 2, "qwen3_vl moe": 1, "qwen35_vl moe": 1, "qwen3_omni": 1, "llava onevision": 1, "internvl": 1,
    "qwen25_vl": 2, "qwen3_asr": 1, "qwen25_omni": 2, "gemma3": 1, "gemma3_text": 1, "gemma4": 1, "qwen3_vl 2b": 2, "qwen35_vl 2b": 2,
    "qwen3_asr 0.6b": 1, "qwen3 0.6b": 1, "qwen25_vl 3b": 2, "qwen25_omni 3b": 2, "glm45v 4.5-106b-a12b": 1, "gemma3 4b": 1, "internvl 1b": 1, "qwen3_vl odd": 0, "qwen35_vl odd": 1,
}  # fmt: skip
# Rows with an image, whose tokens see one another, are not captured.
BOTH_WAYS = ("gemma3", "gemma4", "gemma3 4b")
FEW_TRAINED = (
    ("qwen35_vl 2b", "lora.rank=8"),
    ("qwen3_vl 2b", "lora.rank=8", "lora.parts=[language,vision]"),
    ("qwen35_vl 2b", "lora.rank=8", "lora.base_dtype=fp8"),
    ("qwen35_vl 2b", "model.freeze=[vision]"),
    ("qwen3_vl 2b", "model.freeze=[language]"),
)
APART = 1e-2  # of gradients in bf16, as one vector: attention's backward pass sums in another order each time


@pytest.fixture(scope="module")
def here() -> Iterator[Any]:
    with single_process_world() as world:
        yield world


@pytest.mark.parametrize("case", [*((name,) for name in STACKS_CAPTURED), *FEW_TRAINED], ids=" ".join)
def test_graphs_give_the_same_gradients(case: tuple[str, ...], here: Any, tmp_path: Path, reports: list[str]) -> None:
    from zoo.model.graphs import use_graphs
    from zoo.nn.graphs.layers import release_graphs

    name = case[0]
    stack = STACKS[name]
    folder = stack.write(tmp_path / "model")
    zoo = _load(stack, folder, here, *case[1:])
    samples = [example.sample for example in stack.examples(zoo.assembly.processor).values()]
    rows = [samples, samples[:2], samples[1:], samples, samples[:1]]
    plain = [zoo.gradients([packed_batch(row)], sum(one.num_labels for one in row)) for row in rows]
    _accumulate(zoo)
    left_out = pytest.warns(UserWarning, match="layers of the .* run without") if "odd" in name else nullcontext()
    with left_out:
        assert use_graphs([zoo.model]) == STACKS_CAPTURED[name]
    for number, (row, (loss, wanted)) in enumerate(zip(rows, plain, strict=True)):
        if number == 3:
            release_graphs([zoo.model])  # as a move of memory does
        found, rest = zoo.gradients([packed_batch(row)], sum(one.num_labels for one in row))
        errors = abs(found - loss) / loss, distance(_gradients(zoo, rest), wanted)
        reports.append(f"graphs {' '.join(case)}, {len(row)} samples: loss {errors[0]:.1e}, gradient {errors[1]:.1e}")
        near_ties = 1.5 if FAMILIES[stack.family].experts else 1  # which then choose other experts
        assert errors[0] < 1e-3 and errors[1] < APART * near_ties, errors
    stacks = {module.graphs for module in zoo.model.modules() if getattr(module, "graphs", None) is not None}
    assert len(stacks) == STACKS_CAPTURED[name]
    assert name in BOTH_WAYS or all(stack._captured for stack in stacks if stack.trained)
    del zoo
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", ["qwen3_vl 2b", "qwen35_vl 2b"])
def test_dropout_is_drawn_anew_at_each_replay_and_follows_from_its_seeds(
    name: str, here: Any, tmp_path: Path, reports: list[str]
) -> None:
    """Masks of layers launched one by one, drawn as captured ones are."""
    from zoo.model.graphs import use_graphs
    from zoo.model.lora import seed_dropout
    from zoo.nn.graphs import random
    from zoo.nn.graphs.row import static_tokens

    stack, adapters = STACKS[name], ("lora.rank=8", "lora.parts=[language]", "lora.dropout=0.3")
    zoo = _load(stack, stack.write(tmp_path / "model"), here, *adapters)
    samples = [example.sample for example in stack.examples(zoo.assembly.processor).values()]
    size = static_tokens(sum(len(one.input_ids) for one in samples))
    seed_dropout(zoo.recipe, 3, here)
    with random.inside():
        plain = [zoo.gradients([packed_batch(samples)], 1, pad_to=size) for _ in range(2)]
    apart = distance({k: v for k, v in plain[0][1].items() if v is not None}, plain[1][1])
    _accumulate(zoo)
    use_graphs([zoo.model])
    for _ in range(2):  # captured in between, and not
        seed_dropout(zoo.recipe, 3, here)
        for loss, wanted in plain:
            found, rest = zoo.gradients([packed_batch(samples)], 1, pad_to=size)
            errors = abs(found - loss) / loss, distance(_gradients(zoo, rest), wanted)
            reports.append(
                f"graphs with dropout, {name}: loss {errors[0]:.1e}, gradient {errors[1]:.1e}; other masks {apart:.1e}"
            )
            assert errors[0] < 1e-3 and errors[1] < APART < apart, (errors, apart)


def _accumulate(zoo: Zoo) -> None:
    from zoo.nn.weight_gradients import accumulate_in_place

    for parameter in zoo.model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    accumulate_in_place([zoo.model])


def _gradients(zoo: Zoo, rest: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Gradients in DDP's buffers, which are emptied, and those that autograd gave beside them."""
    found = {}
    for key, parameter in zoo.model.named_parameters():
        if parameter.requires_grad:
            more = None if parameter.grad_added_to_main_grad else rest.get(key)  # type: ignore[attr-defined]
            found[key] = parameter.main_grad + (0 if more is None else more)  # type: ignore[attr-defined]
        parameter.main_grad.zero_()  # type: ignore[attr-defined]
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return found


def _load(stack: Any, folder: Path, here: Any, *overrides: str) -> Zoo:
    from zoo.config.compose import about

    family = about(stack.recipe)["family"]
    fixed = (f"model.family={family}", "train.mtp_loss=0", "engine.precision=bf16")
    zoo = Zoo.load(folder, here, *fixed, *overrides)
    if zoo.recipe.lora.rank:
        adapt([zoo.model], zoo.assembly, zoo.recipe, here)
    return zoo


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor | None]) -> float:
    """|found - wanted| / |wanted| of all gradients as one vector."""
    apart = size = 0.0
    for name, want in wanted.items():
        want = torch.zeros_like(found[name]) if want is None else want.float()
        apart += float((found[name].float() - want).square().sum())
        size += float(want.square().sum())
    return (apart / size) ** 0.5
