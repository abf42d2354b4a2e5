"""megatron-core's AdamW and zoo's one kernel, run by Triton's interpreter on the CPU, on the same gradients.

    TRITON_INTERPRET=1 python tests/support/interpret_updates.py

Prints as JSON, by precision, the largest difference of weights (fp32 masters) and moments relative to their size, of the
model's weights from their masters in steps of their precision, and the updates that follow from the state. A process of its
own, as Triton decides when it is imported.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.engine import single_process_world
from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.engine.checkpoint import initial_weights
from zoo.engine.model import build
from zoo.engine.train import adamw, bad_step_detector, optimization

STEPS = 4


def updated(
    precision: str, here: Any, fused_from: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor], set[int]]:
    """Masters, moments, weights and counts after STEPS updates, those from `fused_from` on in one kernel; two are left out."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            "size=tiny",
            "hardware=cpu",
            f"engine.precision={precision}",
            f"run.dir={folder}",
            "train.lr=1e-3",
        ]
        recipe = validate(load_recipe("qwen35_vl_sft", [*overrides, "train.warmup_steps=2"]), 1)
        assembly = build.assemble(recipe)
        chunks = build.build_model(assembly, recipe, here)
        initial_weights.init_weights(chunks, assembly, recipe, here)
        (wrapped,) = optimization.wrap_ddp(chunks, recipe)
    optimizer, scheduler = optimization.build_optimizer([wrapped], recipe, assembly.family, 10)
    torch.manual_seed(0)
    for step in range(-1, STEPS + 1):
        if step == fused_from:
            adamw.fuse(optimizer)
        for p in wrapped.parameters():
            p.main_grad.copy_(torch.randn(p.shape) * 10.0 ** (step - 2))  # type: ignore[attr-defined]  # some are clipped
        bad_step_detector.step_if(optimizer, scheduler, lambda norm, step=step: 0 <= step < STEPS)
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
    (one,) = optimizer.chained_optimizers
    states = [one.optimizer.state[p] for p in one.get_parameters()]
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    return (
        [p.detach() for p in one.get_parameters()],
        moments,
        [p.detach() for p in wrapped.parameters()],
        {int(s["step"]) for s in states},
    )


def apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest difference of two tensors, relative to the largest value of the second."""
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
        for a, b in zip(found, wanted, strict=True)
    )


def main() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with single_process_world() as here:
        for precision in ("fp32", "bf16"):
            wanted = updated(precision, here, fused_from=99)
            for fused_from in (-1, 2):
                masters, moments, weights, counts = updated(precision, here, fused_from)
                found[f"{precision}, fused from {fused_from}"] = {
                    "masters": apart(masters, wanted[0]),
                    "moments": apart(moments, wanted[1]),
                    # The interpreter cuts digits off where a GPU rounds.
                    "weights": apart([x.float() for x in weights], [x.float() for x in wanted[2]]),
                    "updates": sorted(counts | wanted[3]),
                }
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
