"""Runs with train.optimizer=muon update weights as torch.optim.Muon and torch.optim.AdamW do, published matrix by matrix."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import load_model, single_process_world
from support.recipes import load_effective
from torch import Tensor
from torch.optim import _muon

from zoo.bridge.parallel import model_parameters
from zoo.config.validate import validate
from zoo.model import build
from zoo.model.matrices import is_matrix
from zoo.optim import adamw
from zoo.training import optimization

UPDATES, LR, SCALE, DECAY, BETAS = 4, 2e-3, 3.0, 0.1, (0.9, 0.95)
KEYS = (
    "size=tiny-moe", "hardware=cpu", "engine.threads=1", "train.optimizer=muon", "train.momentum=0.9", f"train.lr={LR}", f"train.min_lr={LR}",
    f"train.matrix_lr_scale={SCALE}", "train.warmup_steps=0", f"train.weight_decay={DECAY}", "train.lr_scale={vision: 0.5}", "train.clip_grad=0",
)  # fmt: skip


class Fp32Torch:
    """torch, where bfloat16 stands for float32."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_updates_are_those_of_torch(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts, delta rule, gated queries and towers. torch orthogonalises in bf16 always, zoo in fp32 where weights are fp32."""
    if precision == "fp32":
        monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)  # as torch 2.11 rounds
        monkeypatch.setattr(_muon, "torch", Fp32Torch())  # as torch 2.15 does
    overrides = [*KEYS, f"engine.precision={precision}", f"run.dir={tmp_path}"]
    recipe = validate(load_effective("qwen35_vl_moe_sft", overrides), 1)
    with single_process_world() as here:
        assembly, chunks = load_model(recipe, here)
        wrapped = optimization.wrap_ddp(chunks, recipe)
        optimizer, scheduler = optimization.build_optimizer(wrapped, recipe, assembly, here, UPDATES)
        parameters = dict(model_parameters(chunks))
        reference = Reference(parameters, assembly)
        generator = torch.Generator().manual_seed(0)
        for _ in range(UPDATES):
            for name, parameter in parameters.items():
                grad = torch.randn(parameter.shape, generator=generator) * parameter.numel() ** -0.5
                parameter.main_grad.copy_(grad)  # type: ignore[attr-defined]  # DDP sets it
                reference.grads[name].copy_(grad)
            adamw.prepare(optimizer)
            norm = float(optimizer.get_grad_norm())
            scheduler.step(increment=1)
            adamw.clip(optimizer, norm)
            optimizer.step_with_ready_grads()
            reference.step()
            wrapped[0].zero_grad_buffer()
            optimizer.zero_grad()
    moved = {name: reference.moved(name) for name in parameters}
    assert len(moved) > 60 and min(moved.values()) > 0
    in_fp32 = {name for name, parameter in parameters.items() if parameter.dtype == torch.float32}
    assert len(in_fp32) == len(parameters) if precision == "fp32" else 0 < len(in_fp32) < 20  # as published
    far = {}
    for name, parameter in parameters.items():
        wanted = reference.weight(name)
        if parameter.dtype == torch.bfloat16:
            wanted = wanted.to(torch.bfloat16).float()
        # In bf16 a last bit of a weight differs where sums of products differ in theirs.
        error = float((parameter.detach().float() - wanted).norm()) / moved[name]
        far[name] = error
    assert max(far.values()) < (1e-4 if precision == "fp32" else 0.05), max(far, key=far.__getitem__)


class Reference:
    """fp32 copies of the weights in published tensors (experts one by one), torch's optimizers on them."""

    def __init__(self, parameters: dict[str, Any], assembly: Any) -> None:
        bridge, self.dims = assembly.family.load("bridge"), build.model_dims(assembly)
        self.transforms = {name: bridge.publish([name])[name] for name in parameters}
        self.before = {name: p.detach().float().clone() for name, p in parameters.items()}
        self.grads = {name: torch.zeros(p.shape) for name, p in parameters.items()}
        self.published: dict[str, list[torch.nn.Parameter]] = {
            name: [torch.nn.Parameter(part.clone()) for part in self.split(name, weight)]
            for name, weight in self.before.items()
        }
        of_muon = {name for name, p in parameters.items() if is_matrix(name, p)}
        self.optimizers: list[Any] = []
        for vision in (False, True):
            names = [name for name in parameters if name.startswith("vision.") == vision]
            lr = LR * (0.5 if vision else 1.0)
            matrices = [one for name in names if name in of_muon for one in self.published[name]]
            muon = torch.optim.Muon(matrices, SCALE * lr, DECAY, 0.9, adjust_lr_fn="match_rms_adamw")
            flat = [one for name in names if name not in of_muon for one in self.published[name]]
            groups = [
                {"params": [one for one in flat if one.ndim > 1], "weight_decay": DECAY},
                {"params": [one for one in flat if one.ndim == 1], "weight_decay": 0.0},
            ]
            self.optimizers += [muon, torch.optim.AdamW(groups, lr, BETAS, 1e-8)]

    def split(self, name: str, tensor: Tensor) -> list[Tensor]:
        if name.endswith("experts.weight1"):
            return [half for expert in tensor for half in expert.chunk(2)]
        if name.endswith("experts.weight2"):
            return list(tensor)
        return self.transforms[name].layout.transform.to_hf(tensor, self.dims)

    def step(self) -> None:
        for name, grad in self.grads.items():
            for one, part in zip(self.published[name], self.split(name, grad), strict=True):
                one.grad = part.clone()
        for optimizer in self.optimizers:
            optimizer.step()

    def weight(self, name: str) -> Tensor:
        parts = [one.detach() for one in self.published[name]]
        if name.endswith("experts.weight1"):
            return torch.stack([torch.cat(pair) for pair in zip(parts[::2], parts[1::2], strict=True)])
        if name.endswith("experts.weight2"):
            return torch.stack(parts)
        return self.transforms[name].layout.transform.to_zoo(parts, self.dims)

    def moved(self, name: str) -> float:
        return float((self.weight(name) - self.before[name]).norm())
