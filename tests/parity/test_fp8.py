"""Models whose decoder multiplies in FP8, scaled by blocks: near bf16, and packed as one by one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine import Zoo, packed_batch, recipe_for, single_process_world
from support.stacks import TINY
from torch import Tensor

from zoo.nn.fp8.linear import FP8ColumnLinear, FP8RowLinear

COARSER = (
    16  # a code has 3 bits of mantissa behind its point and bf16 has 7: what magnifies one rounding magnifies the other
)
MODELS = ("qwen3_vl", "qwen3_vl moe", "qwen35_vl")


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    with single_process_world() as here:
        yield here


def zoo(folder: Path, recipe: str, world: Any, precision: str, *overrides: str) -> Zoo:
    keys = f"engine.precision={precision}", "train.mtp_loss=0", *overrides
    return Zoo.from_recipe(recipe_for(folder, *keys, recipe=recipe), world)


def distance(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> float:
    """|found - wanted| / |wanted| of all gradients as one vector."""
    pairs = [(found[name], want) for name, want in wanted.items() if want is not None]
    apart = sum(float((one.float() - want.float()).square().sum()) for one, want in pairs if one is not None)
    return (apart / sum(float(want.float().square().sum()) for _, want in pairs)) ** 0.5


@pytest.mark.parametrize("name", MODELS)
def test_it_is_near_bf16_and_packed_is_one_by_one(name: str, tmp_path: Path, world: Any) -> None:
    stack = TINY[name]
    folder = stack.write(tmp_path / "model")
    exact, plain = (zoo(folder, stack.recipe, world, precision) for precision in ("fp32", "bf16"))
    eighth = zoo(folder, stack.recipe, world, "bf16", "engine.fp8=true")
    kinds = [type(module) for module in eighth.model.modules()]
    assert kinds.count(FP8ColumnLinear) >= 4 and kinds.count(FP8RowLinear) >= 4
    samples = [example.sample for example in stack.examples(plain.assembly.processor).values()][:5]
    labels = sum(sample.num_labels for sample in samples)
    _, found = exact.gradients([packed_batch(samples)], labels)
    wanted = {f"module.{name}": gradient for name, gradient in found.items()}  # bf16 has a wrapper around the model
    near_loss, near = plain.gradients([packed_batch(samples)], labels)
    near_apart = plain.gradients([packed_batch([sample]) for sample in samples], labels)[1]
    loss, packed = eighth.gradients([packed_batch(samples)], labels)
    apart_loss, apart = eighth.gradients([packed_batch([sample]) for sample in samples], labels)
    errors = {
        "loss from bf16": abs(loss - near_loss) / near_loss,
        "gradient from fp32, over bf16's": distance(packed, wanted) / distance(near, wanted),
        "loss, packed from one by one": abs(loss - apart_loss) / apart_loss,
        "gradient, packed from one by one, over bf16's": distance(packed, apart) / distance(near, near_apart),
    }
    print(errors)
    assert 0 < errors["loss from bf16"] < 2e-2, errors
    assert 2 < errors["gradient from fp32, over bf16's"] < COARSER, errors
    assert errors["loss, packed from one by one"] < 5e-3, errors
    assert errors["gradient, packed from one by one, over bf16's"] < COARSER / 2, errors
