"""megatron-core's distributed AdamW, with the update in one kernel on a GPU.

megatron-core clips gradients, updates fp32 weights and copies them into the model's in some 700 launches that read the
same memory three times; in between the GPU waits for the host. Here a table of addresses, made while the GPU still works
on the backward pass, lets one launch do all of it (`zoo.nn.kernels.adamw`). Place and names of the state stay
megatron-core's, so checkpoints are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zoo.engine.megatron import private

if TYPE_CHECKING:
    from zoo.nn.kernels.adamw import Parts, Table


def fuse(optimizer: Any) -> None:
    """Give each of megatron-core's chained optimizers the fused update."""
    for one in optimizer.chained_optimizers:
        if one.is_stub_optimizer:
            continue
        one.fused = FusedAdamW(one)
        one.step_with_ready_grads = one.fused.update
        if isinstance(one.optimizer, torch.optim.AdamW):
            for (
                group
            ) in one.optimizer.param_groups:  # of megatron-core's step on zeros, before a state is loaded
                group.update(fused=True, foreach=False)


def clip(optimizer: Any, norm: float) -> None:
    """Scale all gradients down to the norm `clip_grad` where `norm`, theirs, is larger; fused, with the update."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    for one in optimizer.chained_optimizers:
        most, parameters = one.config.clip_grad, one.get_parameters()
        if most <= 0.0 or not parameters:
            continue
        if fused := getattr(one, "fused", None):
            fused.clip = min(1.0, most / (norm + 1e-6))
        else:
            clip_grad_by_total_norm_fp32(parameters, most, norm)


def prepare(optimizer: Any) -> None:
    """Find the gradients, before anything waits for the GPU."""
    optimizer.prepare_grads()
    for one in optimizer.chained_optimizers:
        if fused := getattr(one, "fused", None):
            fused.prepare()


def allocate_state(optimizer: Any) -> None:
    """Give chained optimizers that have made no update yet a state that can be saved: step 0, moments of zero."""
    for one in optimizer.chained_optimizers:
        if not one.is_stub_optimizer:
            _allocate(one.optimizer)


def _allocate(optimizer: Any) -> None:
    """State for parameters without one; `optimizer`: PyTorch's AdamW, or one with its names that counts steps by group."""
    by_group = not isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.numel() and parameter not in optimizer.state:
                state = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                if not by_group:
                    state["step"] = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
                optimizer.state[parameter] = state
        if by_group:
            group.setdefault("step", 0)


class FusedAdamW:
    """The update of one distributed optimizer of megatron-core, in the place of its `step_with_ready_grads`.

    Gradients are read through the weights' `grad`, as `prepare_grads` of the optimizer sets it.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.clip = 1.0  # of the next update: the gradient's factor
        self._addresses: list[list[int]] = []
        self._tables: list[list[Table]] = []  # by parameter group
        self._step = 0  # updates that the state has seen
        self._ready = False

    def prepare(self) -> None:
        """Make the tables of addresses again, if any tensor has moved."""
        from zoo.nn.kernels.adamw import make_tables

        groups = self.owner.optimizer.param_groups
        _allocate(self.owner.optimizer)
        copies = self._copies()
        parts = [[self._parts(p, copies) for p in group["params"] if p.numel()] for group in groups]
        addresses = [[x.data_ptr() for part in group for x in part if x is not None] for group in parts]
        if addresses != self._addresses:
            self._addresses, self._tables = addresses, [make_tables(group) for group in parts]
            self._step = self._updates()
        self._ready = True

    def update(self) -> bool:
        """Update weights, moments and copies, then gather the weights of other ranks, as megatron-core does. Always True."""
        from zoo.nn.kernels.adamw import adamw

        if not self._ready:
            self.prepare()
        owner, self._ready = self.owner, False
        self._step += 1
        for group, tables in zip(owner.optimizer.param_groups, self._tables, strict=True):
            for table in tables:
                adamw(
                    table,
                    step=self._step,
                    lr=group["lr"],
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    clip=self.clip,
                )
            if "step" in group:
                group["step"] = self._step
        counters = [state["step"] for state in owner.optimizer.state.values() if "step" in state]
        if counters:
            torch._foreach_add_(counters, 1)
        self.clip = 1.0
        owner.start_param_sync_for_bucket_group_subset()
        return True

    def _updates(self) -> int:
        """How many updates the state has seen, by the state itself."""
        inner = self.owner.optimizer
        counts = {int(group["step"]) for group in inner.param_groups if "step" in group}
        counts |= {int(state["step"]) for state in inner.state.values() if "step" in state}
        assert len(counts) <= 1, f"parameters of one optimizer have seen {sorted(counts)} updates"
        return max(counts, default=0)

    def _parts(self, weight: Tensor, copies: dict[Tensor, Tensor]) -> Parts:
        state = self.owner.optimizer.state[weight]
        assert weight.grad is not None, "prepare_grads gives every weight one"
        return weight.detach(), weight.grad, state["exp_avg"], state["exp_avg_sq"], copies.get(weight)

    def _copies(self) -> dict[Tensor, Tensor]:
        """This rank's part of a parameter in half precision, by its fp32 weight."""
        owner, found = self.owner, {}
        pairs = zip(owner.shard_fp32_from_float16_groups, owner.model_float16_groups, strict=True)
        for weights, parameters in pairs:
            for weight, parameter in zip(weights, parameters, strict=True):
                buffer, _, bucket = owner.model_param_gbuf_map[parameter]
                range_ = private.range_in_bucket(owner, parameter)
                flat = owner.buffers[buffer].buckets[bucket].param_data.view(-1)
                found[weight] = flat[range_.start : range_.end]
        return found
