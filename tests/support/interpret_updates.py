"""zoo's AdamW in megatron-core's distributed optimizer: its one kernel, by Triton's interpreter, and plain PyTorch.

    TRITON_INTERPRET=1 python tests/support/interpret_updates.py

Prints as JSON, by format, the share of masters, moments and weights that differ, by how much at most relative to the largest
value, and the updates that the state has seen: of some tensors alone in every format, and of a model's parameters; and whether
moments in 8 bits are read right for a save. A process of its own, as Triton decides when it is imported.
"""

import json
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.engine import single_process_world
from zoo.checkpoint import initial_weights
from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.model import build
from zoo.nn.adamw.kernel import adamw as kernel
from zoo.nn.adamw.kernel import in_bf16, make_tables
from zoo.nn.adamw.state import Moment, Part, join, split, update
from zoo.optim import adamw
from zoo.optim.adamw import MASTER
from zoo.training import optimization

STEPS = 3
FORMATS = (torch.float32, torch.bfloat16, torch.uint8)


def updated(here: Any, fused: bool) -> tuple[list[list[Tensor]], int]:
    """Masters, moments and weights after STEPS updates, and the count of updates; two steps are left out."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            "size=tiny",
            "hardware=cpu",
            "engine.precision=bf16",
            f"run.dir={folder}",
            "train.optimizer=adamw",
            "train.lr=1e-3",
            "train.exp_avg_dtype=fp8",
            "train.exp_avg_sq_dtype=fp8",
        ]
        recipe = validate(load_recipe("qwen35_vl_sft", [*overrides, "train.warmup_steps=2"]), 1)
        assembly = build.assemble(recipe)
        chunks = build.build_model(assembly, recipe, here)
        initial_weights.init_weights(chunks, assembly, recipe, here)
        build.freeze(chunks, recipe.replace({"model.freeze": ["language"]}), assembly.family)  # the interpreter is slow
        (wrapped,) = optimization.wrap_ddp(chunks, recipe)
    optimizer, scheduler = optimization.build_optimizer([wrapped], recipe, assembly, here, 10)
    torch.manual_seed(0)
    with mock.patch.object(adamw, "has_kernel", lambda parts: fused):
        for step in range(-1, STEPS + 1):
            for p in (p for p in wrapped.parameters() if p.requires_grad):
                p.main_grad.copy_(torch.randn(p.shape) * 10.0 ** (step - 2))  # type: ignore[attr-defined]  # some are clipped
            adamw.prepare(optimizer)
            norm = float(optimizer.get_grad_norm())
            if 0 <= step < STEPS:
                scheduler.step(increment=1)
                adamw.clip(optimizer, norm)
                optimizer.step_with_ready_grads()
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
    (one,) = adamw.optimizers(optimizer)
    held = [p for group in one.param_groups for p in group["params"]]
    masters = [one.get_unscaled_state(p, MASTER) for p in held]
    states = [one.get_unscaled_state(p, name) for p in held for name in adamw.MOMENTS]
    return [masters, states, [p.detach() for p in wrapped.parameters()]], one.updates


def apart(found: list[Tensor], wanted: list[Tensor]) -> tuple[float, float]:
    """The share of values that differ by more than rounding in fp32, and the largest difference, relative to the largest value."""
    differences = [(a - b).abs().float() / b.abs().max().clamp(min=1e-30) for a, b in zip(found, wanted, strict=True)]
    all_of_them = torch.cat([one.flatten() for one in differences])
    return float((all_of_them > 1e-6).float().mean()), float(all_of_them.max())


def alone(split: bool, grad: torch.dtype, mean: torch.dtype, square: torch.dtype) -> dict[str, Any]:
    """Updates of tensors whose sizes end on a block's and a vector's end, or beside."""
    states: list[list[list[Tensor]]] = []
    for fused in (False, True):
        torch.manual_seed(0)
        parts = [part(size, split, grad, mean, square) for size in (1, 300, 1024)]
        for step in range(1, STEPS + 1):
            for one in parts:
                one.grad.copy_(torch.randn(one.grad.shape))
            options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
            if fused:
                for table in make_tables(parts):
                    kernel(table, step=step, clip=0.5, **options)
            else:
                for one in parts:
                    update(one, step=step, clip=0.5, **options)
        masters = [x.weight if x.remainder is None else join(x.weight, x.remainder) for x in parts]
        moments = [moment.read() for x in parts for moment in (x.exp_avg, x.exp_avg_sq)]
        states.append([masters, moments, [x.weight for x in parts]])
    return compared(states[1], states[0]) | {"updates": [STEPS, STEPS]}


def part(size: int, split_weight: bool, grad: torch.dtype, mean: torch.dtype, square: torch.dtype) -> Part:
    """A random weight in fp32, or in two, with moments of zero."""
    weight, remainder = torch.randn(size), None
    if split_weight:
        weight, remainder = split(weight)
    moments = (Moment.zeros(size, dtype, signed, weight.device) for dtype, signed in ((mean, True), (square, False)))
    return Part(weight, remainder, torch.zeros(size, dtype=grad), *moments, seed=size * 128)


def read_in_bf16(signed: bool) -> bool:
    """Whether the kernel reads every code of 8 bits as plain PyTorch does, from within a block to within another."""
    codes, exponents = torch.arange(1024) % 256, torch.tensor([40, 41, 90, 126, 127, 128, 200, 254])
    moment = Moment(codes.to(torch.uint8), exponents.to(torch.uint8), signed)
    cuts = ((0, 1024), (0, 1), (300, 1001), (1023, 1024))
    return all(torch.equal(in_bf16(moment, *cut), moment.read(*cut).bfloat16()) for cut in cuts)


def compared(found: list[list[Tensor]], wanted: list[list[Tensor]]) -> dict[str, Any]:
    names = ("masters", "moments", "weights")
    return {name: apart(a, b) for name, a, b in zip(names, found, wanted, strict=True)}


def main() -> dict[str, Any]:
    found: dict[str, Any] = {"read": read_in_bf16(True) and read_in_bf16(False)}
    for split_weight, mean in product((False, True), FORMATS):
        for square in dict.fromkeys((mean, torch.uint8)):
            grad = FORMATS[split_weight]
            name = f"split {split_weight}, gradients in {grad}, moments in {mean} and {square}"
            found[name] = alone(split_weight, grad, mean, square)
    with single_process_world() as here:
        (wanted, count), (seen, updates) = (updated(here, fused) for fused in (False, True))
        found["a model in bf16, moments in fp8"] = compared(seen, wanted) | {"updates": [count, updates]}
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
