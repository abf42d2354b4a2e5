"""Memory of a rank's device, given back while another program uses it, and taken again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from zoo.errors import UserError
from zoo.nn.graphs.layers import release_graphs
from zoo.optim.adamw import forget, optimizers

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

type Kind = Literal["model", "optimizer", "gradients"]
KINDS: tuple[Kind, ...] = ("model", "optimizer", "gradients")


@dataclass(frozen=True)
class Moved:
    """What one `Memory.move` did on this rank.

    Attributes:
        model, optimizer, gradients: bytes of the device that were given back, or taken again. Gradients are not copied: they are
            zero when they are back.
        seconds: how long it took.
    """

    model: int = 0
    optimizer: int = 0
    gradients: int = 0
    seconds: float = 0.0


@dataclass
class Memory:
    """The storages of a rank's model, optimizer state and gradients, and the host's copies of what was given back.

    A storage is shrunk to nothing in its place, so every view of it (parameters in megatron-core's flat buffers, the
    optimizer's parts of these) is good again once it has its size back. Its address may be another one then, so CUDA graphs, which hold
    the addresses of weights and gradients, are given up with these.
    """

    chunks: Sequence[MegatronModule]  # under megatron-core's DDP where they are trained
    optimizer: Any = None  # None where nothing is trained
    away: dict[Kind, list[tuple[torch.UntypedStorage, Tensor | None, int]]] = field(default_factory=dict)

    @torch.no_grad()
    def move(self, there: bool, kinds: Iterable[Kind]) -> Moved:
        """Give the memory of these kinds back (`there` is False), or take it again; what is so already stays."""
        began, moved = time.monotonic(), {}
        for kind in kinds:
            moved[kind] = self._take(kind) if there else self._give(kind)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if not there:
                torch.cuda.empty_cache()
        return Moved(**moved, seconds=time.monotonic() - began)

    def refuse_away(self, kinds: Iterable[Kind], call: str) -> None:
        """Raise UserError where what a call needs is not there."""
        away = [kind for kind in kinds if kind in self.away]
        if away:
            raise UserError(
                f"{call}: {', '.join(away)} {'is' if len(away) == 1 else 'are'} on the host; call "
                f'engine.to("cuda") first, which takes everything back'
            )

    def _give(self, kind: Kind) -> int:
        if kind in self.away:
            return 0
        if kind != "optimizer":
            release_graphs(self.chunks)
        storages = self._storages(kind)
        held = [(storage, None if kind == "gradients" else _copied(storage), storage.nbytes()) for storage in storages]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for storage, _, _ in held:
            storage.resize_(0)
        self.away[kind] = held
        return sum(size for _, _, size in held)

    def _take(self, kind: Kind) -> int:
        total = 0
        for storage, copy, size in self.away.pop(kind, []):
            storage.resize_(size)
            whole = _bytes(storage)
            if copy is None:
                whole.zero_()
            else:
                whole.copy_(copy, non_blocking=True)
            total += size
        if self.optimizer is not None:
            forget(self.optimizer)
        return total

    def _storages(self, kind: Kind) -> list[torch.UntypedStorage]:
        """The storages of a kind that have any bytes, once each, and without the model's for the other kinds."""
        model: list[Tensor] = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        tensors = model
        if kind == "optimizer":
            tensors = list(self._of_optimizer())
        elif kind == "gradients":
            chunks = self.chunks if self.optimizer is not None else ()
            tensors = [b.grad_data for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        storages = {storage._cdata: storage for storage in map(Tensor.untyped_storage, tensors)}
        of_model = set() if kind == "model" else {parameter.untyped_storage()._cdata for parameter in model}
        return [storage for key, storage in storages.items() if key not in of_model and storage.nbytes()]

    def _of_optimizer(self) -> Iterator[Tensor]:
        for optimizer in optimizers(self.optimizer) if self.optimizer is not None else ():
            for parameter, state in optimizer.state.items():
                if optimizer.on_host(parameter):
                    continue
                yield from (tensor for tensor in state.values() if isinstance(tensor, Tensor))
                for name in optimizer.moment_names(parameter):
                    exponents = optimizer.moment(parameter, name).exponents
                    if exponents is not None:
                        yield exponents


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """The whole storage as (N,) uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copied(storage: torch.UntypedStorage) -> Tensor:
    """A copy of a whole storage on the host, pinned where it comes from a GPU."""
    whole = _bytes(storage)
    copy = torch.empty(whole.shape, dtype=torch.uint8, device="cpu", pin_memory=whole.is_cuda)
    return copy.copy_(whole, non_blocking=True)
