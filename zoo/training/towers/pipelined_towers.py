"""`PipelinedTowers`: the towers of a pipeline's first stage, which every stage of it runs (parallel.towers=shared).

The first stage has the towers that are trained, saved and exported. Each later one has a copy that neither checkpoints nor optimizers know:
before a step it takes the first stage's weights, behind the step it gives its gradients to those of the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.nn.multimodal import MultimodalModel
from zoo.parallel.world import World
from zoo.training.towers.tower_copy import tower_parameters

if TYPE_CHECKING:
    from torch.nn import Parameter

PIECE = 2**26  # numbers that are sent at once


class PipelinedTowers:
    """A stage's towers; stages call its methods in the same order."""

    def __init__(self, model: MultimodalModel, world: World) -> None:
        """`model`: that in training on the first stage, a copy on the others."""
        self.is_first, self.group = world.pp_rank == 0, world.groups.pp
        self.source = dist.get_process_group_ranks(self.group)[0]
        every = [parameter for _, parameter in tower_parameters(model)]
        buffers = [buffer for name in model.tower_modules for buffer in getattr(model, name).buffers()]
        self.trained = [parameter for parameter in every if parameter.requires_grad]
        self.stale: Sequence[Tensor] = [*every, *buffers]  # what `take_weights` brings

    @torch.no_grad()
    def take_weights(self) -> None:
        """Bring the first stage's weights to the others: all the first time, then those that are trained."""
        for dtype in {tensor.dtype: None for tensor in self.stale}:
            for piece in _pieces(tensor for tensor in self.stale if tensor.dtype == dtype):
                flat = torch.cat([tensor.flatten() for tensor in piece])
                dist.broadcast(flat, self.source, group=self.group)
                for tensor, values in zip(piece, flat.split([tensor.numel() for tensor in piece]), strict=True):
                    tensor.copy_(values.view_as(tensor))
        self.stale = self.trained

    @torch.no_grad()
    def give_gradients(self) -> None:
        """Add the other stages' gradients to what the first one has under DDP; sums are made in fp32."""
        for piece in _pieces(self.trained):
            flat = torch.cat([self._gradient(parameter).flatten().float() for parameter in piece])
            dist.reduce(flat, self.source, group=self.group)
            for parameter, total in zip(piece, flat.split([p.numel() for p in piece]), strict=True):
                parameter.grad = None
                if self.is_first:
                    of_ddp: Any = parameter
                    of_ddp.main_grad.copy_(total.view_as(parameter))

    def _gradient(self, parameter: Parameter) -> Tensor:
        of_ddp: Any = parameter
        if self.is_first:
            main: Tensor = of_ddp.main_grad
            return main
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _pieces[T: Tensor](tensors: Iterable[T]) -> Iterator[list[T]]:
    """The tensors in their order, as many at once as `PIECE` numbers allow."""
    piece: list[T] = []
    for tensor in tensors:
        if piece and sum(map(Tensor.numel, piece)) + tensor.numel() > PIECE:
            yield piece
            piece = []
        piece.append(tensor)
    if piece:
        yield piece
