"""AdamW as the inner optimizer of megatron-core's distributed one, on the compact state of `zoo.nn.adamw.state`.

megatron-core would keep an fp32 copy of each bf16 weight, make the update in some 700 launches that read the same memory
three times, and copy the result into the weights. Here one launch a group does all of it on a GPU; without one, plain
PyTorch does. Which part of which parameter a rank holds, and what its state is called, stay megatron-core's: it treats
this optimizer as the precision-aware one of Transformer Engine, whose calls it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zoo.nn.adamw.state import BLOCK, MASTER, MOMENTS, Moment, Part, UpdateOptions, join, split, update
from zoo.nn.kernels import has_triton
from zoo.optim.copies import SharedRange
from zoo.optim.host_update import PIECE, HostUpdate, on_host, pieces

if TYPE_CHECKING:
    from megatron.core.optimizer import ChainedOptimizer
    from torch.optim.optimizer import ParamsT

    from zoo.nn.adamw.kernel import Table


def optimizers(optimizer: ChainedOptimizer) -> Iterator[AdamW]:
    """The inner optimizers that megatron-core chained, but for those without parameters."""
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            yield part.optimizer


def clip(optimizer: ChainedOptimizer, norm: float) -> None:
    """Have the next update scale all gradients, whose norm is given, so that it is `clip_grad` where it was more."""
    most = optimizer.config.clip_grad
    for inner in optimizers(optimizer):
        inner.clip = min(1.0, most / (norm + 1e-6)) if most > 0.0 else 1.0


def prepare(optimizer: ChainedOptimizer) -> None:
    """Find the gradients, before anything waits for the GPU: views of DDP's buffers, which stay what they are."""
    if not all(inner.is_prepared() for inner in optimizers(optimizer)):
        optimizer.prepare_grads()
        forget(optimizer)
    for inner in optimizers(optimizer):
        inner.prepare()


def forget(optimizer: ChainedOptimizer) -> None:
    """Have the next `prepare` find all tensors anew. To be called where their memory was moved."""
    for inner in optimizers(optimizer):
        inner.forget()


def norm_gradients(optimizer: ChainedOptimizer) -> list[Tensor]:
    """The gradients of this rank's share of the norm, after `prepare`: megatron-core's choice of them, made once."""
    gradients: list[Tensor] = []
    for chained in optimizer.chained_optimizers:
        if not chained.is_stub_optimizer:
            inner: AdamW = chained.optimizer
            if inner.norm_gradients is None:
                inner.norm_gradients = chained.get_grads_for_grad_norm()
            gradients += inner.norm_gradients
    return gradients


def allocate_state(optimizer: ChainedOptimizer) -> None:
    """Give chained optimizers that have never made an update a state that can be saved: no step, moments of zero."""
    for inner in optimizers(optimizer):
        inner.allocate()


class AdamW(torch.optim.Optimizer):
    """The update of one of megatron-core's distributed optimizers.

    Parameters are flat: this rank's part of a bf16 weight, with 16 more bits in the state, or of an fp32 weight.
    Gradients are read from `decoupled_grad`, which has a dtype of its own.

    Attributes:
        clip: factor of the gradients in the next update.
        norm_gradients: those that count for the norm, once they are found.
        state: by parameter: `master_param` (int16 remainder, or the fp32 parameter), `exp_avg`, `exp_avg_sq`, as held.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        offload: float = 0.0,
        threads: int | None = None,
        **_: object,
    ) -> None:
        """`exp_avg_dtype`, `exp_avg_sq_dtype`: float32, bfloat16, or uint8 for 8 bits by block; `offload`: share of the
        parameters whose state and update are on the host, with so many `threads` of it; other keywords are Transformer
        Engine's, given by megatron-core."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.clip = 1.0
        self._dtypes = (exp_avg_dtype, exp_avg_sq_dtype)
        self._moments: dict[Tensor, dict[str, Moment]] = {}
        self._seeds: dict[Tensor, int] = {}  # of the random bits that round moments
        self._addresses: list[list[int]] = []
        self._tables: list[list[Table]] = []  # by parameter group
        self._parts: list[list[Part]] | None = None  # of updates, by parameter group, once they are found
        self.norm_gradients: list[Tensor] | None = None
        self._offload = offload
        self._offloaded: set[Tensor] | None = None  # parameters whose state is on the host, once they are chosen
        self._host = HostUpdate(threads)
        self._host_parts: list[list[Part]] = []  # the same of parameters on the host
        self._shared: list[SharedRange] = []
        self._copies: set[Tensor] = set()  # parameters that another pipeline stage updates

    @property
    def updates(self) -> int:
        """How many updates the state has seen."""
        counts = {int(group.get("step", 0)) for group in self.param_groups}
        assert len(counts) <= 1, f"parameter groups of one optimizer have seen {sorted(counts)} updates"
        return max(counts, default=0)

    @updates.setter
    def updates(self, count: int) -> None:
        for group in self.param_groups:
            group["step"] = count

    def share(self, shared: SharedRange) -> None:
        """Send a parameter to other pipeline stages after each update, or, where it is their copy, take it over."""
        self._shared.append(shared)
        self._copies |= {shared.part} if shared.is_copy else set()

    def send_shared(self) -> None:
        """Give copies of parameters the values of those that are updated."""
        for shared in self._shared:
            shared.send()

    def updates_here(self, parameter: Tensor) -> bool:
        """Whether this optimizer has elements of a parameter to update."""
        return bool(parameter.numel()) and parameter not in self._copies

    def on_host(self, parameter: Tensor) -> bool:
        """Whether the host has a parameter's state, and updates it."""
        if not self._offload:
            return False
        if self._offloaded is None:
            every = [p for group in self.param_groups for p in group["params"] if self.updates_here(p)]
            chosen = on_host([p.numel() for p in every], self._offload)
            self._offloaded = {p for p, offloaded in zip(every, chosen, strict=True) if offloaded}
        return parameter in self._offloaded

    def allocate(self) -> None:
        """Give every parameter that has no state yet one that no update has moved."""
        for group in self.param_groups:
            group.setdefault("step", 0)
            for parameter in group["params"]:
                if self.updates_here(parameter) and parameter not in self._moments:
                    self.initialize_state(parameter)

    def initialize_state(self, parameter: Tensor) -> None:
        """The same for one parameter; megatron-core's call."""
        numel = parameter.numel()
        device, zeros = parameter.device, None
        if self.on_host(parameter):
            device, zeros = torch.device("cpu"), self._host.zeros
        formats = dict(zip(MOMENTS, zip(self._dtypes, (True, False), strict=True), strict=True))
        moments = {name: Moment.zeros(numel, *formats[name], device, zeros) for name in self.moment_names(parameter)}
        master = parameter.detach()
        if parameter.dtype == torch.bfloat16:
            master = (zeros or partial(torch.zeros, device=device))(numel, dtype=torch.int16)
        self.forget()
        self._moments[parameter] = moments
        self.state[parameter] = {MASTER: master, **{name: moment.values for name, moment in moments.items()}}

    def moment_names(self, parameter: Tensor) -> tuple[str, ...]:
        """The moments that a parameter has, or will have."""
        return MOMENTS

    def updates_by_element(self, parameter: Tensor) -> bool:
        """Whether `update` makes a parameter's update; a subclass may make others."""
        return True

    def get_unscaled_state(self, parameter: Tensor, name: str) -> Tensor:
        """(N,) fp32 of `master_param`, `exp_avg` or `exp_avg_sq`, perhaps the tensor itself; megatron-core's call."""
        if name == MASTER:
            if parameter.dtype != torch.bfloat16:
                return parameter.detach()
            return join(parameter.detach(), self.state[parameter][MASTER].to(parameter.device))
        return self.moment(parameter, name).read()

    @torch.no_grad()
    def set_scaled_state(self, parameter: Tensor, name: str, values: Tensor) -> None:
        """Take (N,) fp32 values over, a moment rounded to its format and a master with its weight; megatron-core's call."""
        if parameter not in self._moments:
            self.initialize_state(parameter)
        values = values.to(parameter.device, torch.float32)
        if name != MASTER:
            self.moment(parameter, name).write(values)
        elif parameter.dtype == torch.bfloat16:
            weight, remainder = split(values)
            parameter.copy_(weight)
            self.state[parameter][MASTER].copy_(remainder)
        else:
            parameter.copy_(values)

    def moment(self, parameter: Tensor, name: str) -> Moment:
        """`exp_avg` or `exp_avg_sq` of a parameter that has a state, as it is held."""
        return self._moments[parameter][name]

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters and the number of updates; tensors are asked for one by one."""
        groups = [
            {**group, "params": list(range(len(group["params"]))), "step": self.updates} for group in self.param_groups
        ]
        return {"state": {0: {"step": torch.tensor(float(self.updates))}}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the hyper-parameters over that `state_dict` gave."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})

    def is_prepared(self) -> bool:
        """Whether gradients and state have been found, and megatron-core still has the views of the gradients."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"] if parameter.numel())
        first = next(parameters, None)
        return self._parts is not None and getattr(first, "decoupled_grad", None) is not None

    def forget(self) -> None:
        """Have the next `prepare` find gradients and state anew."""
        self._parts = self.norm_gradients = None

    def prepare(self) -> None:
        """Find gradients and state, unless they are known; on a GPU, make the tables where tensors lie elsewhere than before."""
        if self._parts is not None:
            return
        self.allocate()
        seed = 0
        parts: list[list[Part]] = []
        self._host_parts = []
        for group in self.param_groups:
            parts.append([])
            self._host_parts.append([])
            for parameter in group["params"]:
                if self.updates_here(parameter):
                    self._seeds[parameter] = seed
                    if self.updates_by_element(parameter):
                        where = self._host_parts if self.on_host(parameter) else parts
                        where[-1].append(self._part(parameter, seed))
                seed += -(-parameter.numel() // BLOCK) * BLOCK
        self._parts = parts
        if has_kernel(parts):
            from zoo.nn.adamw.kernel import make_tables

            addresses = [[tensor.data_ptr() for part in group for tensor in _tensors(part)] for group in parts]
            if addresses != self._addresses:
                self._addresses, self._tables = addresses, [make_tables(group) for group in parts]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # PyTorch's has a closure's loss
        """Make the update: weights, the bits that complete them, and moments. Gradients are left as they are."""
        if self._parts is None:
            self.prepare()
        assert self._parts is not None
        count = self.updates + 1
        every = [
            UpdateOptions(
                step=count,
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                clip=self.clip,
            )
            for group in self.param_groups
        ]
        pairs = zip(self._host_parts, every, strict=True)
        self._host.start([(part, options) for parts, options in pairs for part in parts])
        for index, options in enumerate(every):
            if self._tables:
                from zoo.nn.adamw.kernel import adamw

                for table in self._tables[index]:
                    adamw(table, **options)
                continue
            for part in self._parts[
                index
            ]:  # in pieces: temporary values would take many times the memory of a parameter
                for piece in pieces(part, PIECE):
                    update(piece, **options)
        self._host.finish()
        self.send_shared()
        self.updates = count
        self.clip = 1.0

    def _part(self, parameter: Tensor, seed: int) -> Part:
        first, second = (self._moments[parameter][name] for name in MOMENTS)
        master = self.state[parameter][MASTER] if parameter.dtype == torch.bfloat16 else None
        grad: Tensor = parameter.decoupled_grad  # type: ignore[attr-defined]  # prepare_grads sets it
        return Part(parameter.detach(), master, grad, first, second, seed)


def has_kernel(parts: list[list[Part]]) -> bool:
    """Whether one launch can make the update of these parameters."""
    return has_triton() and any(part.weight.is_cuda for group in parts for part in group)


def _tensors(part: Part) -> Iterator[Tensor]:
    moments = (tensor for moment in (part.exp_avg, part.exp_avg_sq) for tensor in (moment.values, moment.exponents))
    return (tensor for tensor in (part.weight, part.remainder, part.grad, *moments) if tensor is not None)
