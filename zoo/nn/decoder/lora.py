"""Low-rank adapters (LoRA, arXiv 2106.09685) of weights that are not trained themselves.

An adapter adds scale * B A dropout(x) to what a linear makes of x; A is (rank, in), B (out, rank) and zero at first. It
is a child of the linear, by the name `lora`, and a forward hook adds to the linear's output.

A fused linear stands for several published ones, each of which has an A and a B of its own (queries, keys and values,
gate and up). `a` holds their A one below the other and `b` the rows of their B in the order of the fused weight's rows;
which part a row is of is fixed. So B is cut over ranks as the weight is, whatever the order of its rows. Parts of lower rank
are filled up with zeros, which have no gradient.

DoRA (arXiv 2402.09353) has each row of the sum of weight and adapter divided by its norm, which has no gradient, and multiplied
by a trained magnitude `m` (out,), cut as B is.

Tensor parallelism exchanges activations of width rank alone:

    linear             a                       b                       in between
    column-parallel    whole                   rows, as the weight     copied to all ranks (SP: gathered)
    row-parallel       columns, as the weight  whole                   summed over ranks (SP: and scattered)
    a tower's          whole                   whole                   -

Under sequence parallelism the one that is whole sees a rank's own tokens, and is marked for megatron-core to sum its
gradient, as a norm's weight is. Experts' adapters are cut over expert parallelism with the experts, and under expert
tensor parallelism as above; there the exchange is the token dispatcher's, and only gradients are summed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from zoo.nn.decoder.frozen.modules import dense_weight
from zoo.nn.graphs import random

SAME, OWN = ("zoo-lora-same", "zoo-lora-own")  # states of the random tracker: alike on tensor-parallel ranks, or not

Split = Literal["rows", "columns"]
"""How tensor-parallel ranks share a weight, of a column-parallel and of a row-parallel linear."""


@dataclass(frozen=True)
class Lowrank:
    """An adapter's numbers."""

    rank: int  # the largest of its parts
    scale: float  # of what it adds, of the first part
    dropout: float = 0.0  # of the linear's input; experts have none
    dora: bool = False
    scales: tuple[float, ...] = ()  # of each part, where they differ


@dataclass(frozen=True)
class Cut:
    """How a parameter of an adapter is shared: `sections` along `axis`, each cut over `group`; whole without an axis."""

    group: ProcessGroup
    axis: int | None = None
    sections: tuple[int, ...] = ()  # sizes on this rank


class Adapter(torch.nn.Module, ABC):
    """Parameters `a` and `b`, with DoRA `m`, beside a `weight`, and how ranks share each."""

    a: torch.nn.Parameter
    b: torch.nn.Parameter
    m: torch.nn.Parameter  # with DoRA

    def __init__(self, lowrank: Lowrank, replicas: ProcessGroup) -> None:
        """`replicas`: process group of the ranks that hold the same part of the weight."""
        super().__init__()
        self.lowrank, self.replicas = lowrank, replicas
        self.cuts: dict[str, Cut] = {}
        self.hook: RemovableHandle | None = None  # takes a linear's adapter off again

    def _add(
        self, name: str, weight: Tensor, shape: tuple[int, ...], cut: Cut, *, sequence_parallel: bool = False
    ) -> None:
        """A parameter of zeros, shared as `cut` says, in the dtype of its products and reduced as its gradient would be."""
        dtype = getattr(weight, "read_as", weight.dtype)  # one of fp32 may be multiplied in half precision
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=weight.device))
        for mark in ("allreduce", "average_gradients_across_tp_domain"):
            if hasattr(weight, mark):
                setattr(parameter, mark, getattr(weight, mark))
        set_tensor_model_parallel_attributes(parameter, cut.axis is not None, -1 if cut.axis is None else cut.axis, 1)
        parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.register_parameter(name, parameter)
        self.cuts[name] = cut

    @abstractmethod
    def delta(self) -> Tensor:
        """What the adapter adds to this rank's part of the weight, in fp32."""

    def add_to(self, weight: Tensor) -> None:
        """Add it to this rank's part of the weight, in fp32."""
        weight += self.delta()

    def sharded(self, prefix: str) -> ShardedStateDict:
        """The parameters as megatron-core's checkpoints take them, under names that no parallel layout changes."""
        return {f"{prefix}{name}": self._sharded(name, f"{prefix}{name}") for name in self.cuts}

    def _sharded(self, name: str, key: str) -> ShardedTensor | ShardedTensorFactory:
        cut, parameter = self.cuts[name], getattr(self, name)
        axis = cut.axis
        whole_on = cut.group.rank() if cut.group is not None and axis is None else 0
        replica = (0, whole_on, self.replicas.rank())
        offsets = self._offsets()

        def piece(piece_key: str, tensor: Tensor) -> ShardedTensor:
            along = [] if axis is None else [(axis, cut.group.rank(), cut.group.size())]
            return ShardedTensor.from_rank_offsets(piece_key, tensor, *offsets, *along, replica_id=replica)

        if axis is None or len(cut.sections) < 2:
            return piece(key, parameter)

        def build(built_key: str, tensor: Tensor, _: object, __: object) -> list[ShardedTensor]:
            parts = tensor.split(list(cut.sections), dim=axis)
            return [piece(f"{built_key}_{i}", part) for i, part in enumerate(parts)]

        return ShardedTensorFactory(key, parameter, build, lambda parts: torch.cat(parts, dim=axis), replica)

    def _offsets(self) -> list[tuple[int, int, int]]:
        """(axis, rank, size) of what cuts all parameters."""
        return []


class LinearAdapter(Adapter):
    """Adapter of a linear, of `parts` published linears."""

    owns: Tensor | None
    factors: Tensor | None  # (parts * rank,), of the scale

    def __init__(
        self,
        weight: torch.nn.Parameter,
        lowrank: Lowrank,
        owner: Tensor,
        groups: ProcessGroupCollection,
        *,
        split: Split | None,
        sections: tuple[int, ...] = (),
        sequence_parallel: bool = False,
    ) -> None:
        """`owner` (out,): the part that each row of this rank's weight is of, counted from 0; -1 for a part without adapter.

        `sections`: rows of this rank's weight that are cut by themselves. `split` None: all ranks have the weight whole.
        """
        super().__init__(lowrank, groups.dp_cp)
        out, width = weight.shape
        parts = int(owner.max()) + 1
        self.split, self.group = split, groups.tp
        self.sequence_parallel = sequence_parallel and split is not None
        whole, mark = Cut(groups.tp), self.sequence_parallel
        a, b = (whole, Cut(groups.tp, 0, sections)) if split == "rows" else (whole, whole)
        if split == "columns":
            a = Cut(groups.tp, 1)
        self._add("a", weight, (parts * lowrank.rank, width), a, sequence_parallel=mark and split == "rows")
        self._add("b", weight, (out, lowrank.rank), b, sequence_parallel=mark and split == "columns")
        if lowrank.dora:
            m = whole if split == "columns" else b
            self._add("m", weight, (out,), m, sequence_parallel=mark and split == "columns")
        factors = torch.tensor(lowrank.scales).repeat_interleave(lowrank.rank) / lowrank.scale
        self.register_buffer("factors", factors.to(weight.device) if lowrank.scales else None, persistent=False)
        mixed = parts > 1 or bool((owner < 0).any())
        owns = owner[:, None] == torch.arange(parts, device=owner.device)
        self.register_buffer("owns", owns.to(weight.device, weight.dtype) if mixed else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the linear's output, x being its input, both as the linear shares them over ranks; without DoRA."""
        return self._product(self._dropped(x))

    def directed(self, linear: torch.nn.Module, x: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
        """With DoRA, what is added to a linear's output, which has that bias in it; the linear sees dropout too, as in PEFT."""
        dropped = self._dropped(x)
        if dropped is not x:
            again = linear.forward(dropped)
            out = again[0] if isinstance(again, tuple) else again
        ratio = self._ratio(dense_weight(linear.weight))  # type: ignore[arg-type]
        base = out if bias is None else out - bias
        return (ratio - 1).to(out.dtype) * base + ratio.to(out.dtype) * self._product(dropped)

    def norm(self, weight: Tensor) -> Tensor:
        """(out,) fp32: the norm of each row of this rank's part of weight and adapter. Ranks that share columns must ask together."""
        a, b = self.a.detach().float(), self._scaled(self._rows(self.b.detach()).float())
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
        squares += ((2 * F.linear(weight, self.a.detach().to(weight.dtype)).float() + b @ (a @ a.T)) * b).sum(dim=1)
        if self.split == "columns" and self.group.size() > 1:
            torch.distributed.all_reduce(squares, group=self.group)
        return squares.clamp_(min=torch.finfo(torch.float32).tiny).sqrt_()

    def _ratio(self, weight: Tensor) -> Tensor:
        """(out,): magnitudes over norms; 1 for rows of parts without an adapter."""
        with torch.no_grad():
            norm = self.norm(weight)
        ratio = self.m / norm
        return ratio if self.owns is None else torch.where(self.owns.any(dim=1), ratio, 1.0)

    def _scaled(self, inner: Tensor) -> Tensor:
        """(..., parts * rank) times each part's scale."""
        inner = inner * self.lowrank.scale
        return inner if self.factors is None else inner * self.factors.to(inner.dtype)

    def _product(self, x: Tensor) -> Tensor:
        inner = self._scaled(F.linear(x, self.a))
        if self.split == "rows" and self.sequence_parallel:
            inner = gather_from_sequence_parallel_region(inner, group=self.group)
        elif self.split == "rows":
            inner = copy_to_tensor_model_parallel_region(inner, group=self.group)
        elif self.split == "columns" and self.sequence_parallel:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
        elif self.split == "columns":
            inner = reduce_from_tensor_model_parallel_region(inner, group=self.group)
        return F.linear(inner, self._rows(self.b))

    def delta(self) -> Tensor:
        """(out, in) of this rank."""
        return self._scaled(self._rows(self.b.float())) @ self.a.float()

    def add_to(self, weight: Tensor) -> None:
        """With DoRA ranks that share columns must ask together."""
        ratio = self._ratio(weight) if self.lowrank.dora else None
        super().add_to(weight)
        if ratio is not None:
            weight *= ratio[:, None]

    def _rows(self, b: Tensor) -> Tensor:
        """(out, parts * rank): each row of B at its own part's columns, zeros at the others'."""
        if self.owns is None:
            return b
        return (b[:, None] * self.owns[:, :, None].to(b.dtype)).flatten(1)

    def _dropped(self, x: Tensor) -> Tensor:
        """x with dropout: of one mask on all ranks that have the same x, of others where theirs differ."""
        if not (self.lowrank.dropout and self.training):
            return x
        name = SAME if self.split == "rows" and not self.sequence_parallel else OWN
        if generator := random.generator_inside(name, x.device):
            return random.dropout(x, self.lowrank.dropout, generator)
        with get_cuda_rng_tracker().fork(name):
            return F.dropout(x, self.lowrank.dropout)


class ExpertAdapter(Adapter):
    """Adapter of one stacked weight (E, out, in) of experts: `a` (E, rank, in), `b` (E, out, rank)."""

    def __init__(
        self,
        weight: torch.nn.Parameter,
        lowrank: Lowrank,
        groups: ProcessGroupCollection,
        *,
        split: Split,
        sections: tuple[int, ...] = (),
    ) -> None:
        """`split`: how expert tensor parallelism cuts one expert's matrix; `sections`: as `LinearAdapter`."""
        super().__init__(lowrank, groups.expt_dp)
        experts, out, width = weight.shape
        self.split, self.group, self.ep_group = split, groups.expt_tp, groups.ep
        whole = Cut(groups.expt_tp)
        self._add("a", weight, (experts, lowrank.rank, width), whole if split == "rows" else Cut(groups.expt_tp, 2))
        self._add(
            "b", weight, (experts, out, lowrank.rank), Cut(groups.expt_tp, 1, sections) if split == "rows" else whole
        )

    def forward(self, on_gpu: bool) -> tuple[Tensor, Tensor, float]:
        """The two factors of what is added to each expert's product, (E, rank, in) and (E, out, rank), and their scale."""
        a: Tensor = self.a
        b: Tensor = self.b
        # The one that ranks have whole sees a share of the sum on each: its gradient is summed over them.
        if self.split == "rows":
            a = copy_to_tensor_model_parallel_region(a, group=self.group)
        else:
            b = copy_to_tensor_model_parallel_region(b, group=self.group)
        short = -self.lowrank.rank % 8 if on_gpu else 0  # grouped_mm wants rows of 16 bytes
        return F.pad(a, (0, 0, 0, short)), F.pad(b, (0, short)), self.lowrank.scale

    def delta(self) -> Tensor:
        """(E, out, in) of this rank."""
        return self.lowrank.scale * (self.b.float() @ self.a.float())

    def add_to(self, weight: Tensor) -> None:
        """Expert by expert, as all of them would take as much memory again."""
        for of_expert, a, b in zip(weight, self.a, self.b, strict=True):
            of_expert += self.lowrank.scale * (b.float() @ a.float())

    def _offsets(self) -> list[tuple[int, int, int]]:
        return [(0, self.ep_group.rank(), self.ep_group.size())]


def attach(linear: torch.nn.Module, adapter: LinearAdapter) -> None:
    """Have a linear add what its adapter gives; its output is a tensor, or a tuple that starts with one."""
    linear.lora = adapter
    adapter.hook = linear.register_forward_hook(_add_delta)


def detach(linear: torch.nn.Module) -> None:
    """The linear as it was."""
    assert isinstance(linear.lora, LinearAdapter) and linear.lora.hook is not None
    linear.lora.hook.remove()
    del linear.lora


def _add_delta(linear: torch.nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
    adapter: Any = linear.lora
    out, *others = output if isinstance(output, tuple) else (output,)
    if adapter.lowrank.dora and adapter.lowrank.scale:  # without a scale the adapter is off
        apart = others and others[0] is not None  # the bias, which others add
        delta = adapter.directed(linear, inputs[0], out, None if apart else getattr(linear, "bias", None))
    else:
        delta = adapter(inputs[0])
    return (out + delta, *others) if isinstance(output, tuple) else out + delta


def seed_dropout(device: torch.device, shared_seed: int, rank_seed: int) -> None:
    """Start the masks' random numbers from two seeds; megatron-core's recompute goes back to them by itself.

    Layers that are captured as graphs draw other masks from the same seeds.
    """
    tracker = get_cuda_rng_tracker()
    for name, seed in ((SAME, shared_seed), (OWN, rank_seed)):
        tracker.states_[name] = torch.Generator(device).manual_seed(seed).get_state()
        random.seed(name, device, seed)
