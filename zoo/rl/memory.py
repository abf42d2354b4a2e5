"""Memory of an engine's device, given back while another program uses it, and taken again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from zoo.errors import UserError
from zoo.optim.adamw import forget, optimizers
from zoo.rl.parts import EngineParts

type Kind = Literal["model", "optimizer", "gradients"]
KINDS: tuple[Kind, ...] = ("model", "optimizer", "gradients")


@dataclass(frozen=True)
class Moved:
    """What one `zoo.Engine.to` did on this rank.

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
    optimizer's parts of these) is good again once it has its size back.
    """

    parts: EngineParts
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
        gone = [kind for kind in kinds if kind in self.away]
        if gone:
            raise UserError(
                f"{call}: {', '.join(gone)} {'is' if len(gone) == 1 else 'are'} on the host; call "
                f'engine.to("cuda") first, which takes everything back'
            )

    def _give(self, kind: Kind) -> int:
        if kind in self.away:
            return 0
        held, total = [], 0
        for tensor in self._tensors(kind):
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            copy = None if kind == "gradients" else _copied(tensor)
            held.append((storage, copy, size))
            total += size
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for storage, _, _ in held:
            storage.resize_(0)
        self.away[kind] = held
        return total

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
        if self.parts.optimizer is not None:
            forget(self.parts.optimizer)
        return total

    def _tensors(self, kind: Kind) -> Iterator[Tensor]:
        """One tensor of each storage of a kind that has any bytes."""
        seen = set() if kind == "model" else {_key(tensor) for tensor in self._of_model()}
        by_kind = {"model": self._of_model, "optimizer": self._of_optimizer, "gradients": self._of_gradients}
        for tensor in by_kind[kind]():
            if _key(tensor) not in seen and tensor.untyped_storage().nbytes():
                seen.add(_key(tensor))
                yield tensor

    def _of_model(self) -> Iterator[Tensor]:
        for chunk in self.parts.chunks:
            yield from chunk.parameters()

    def _of_optimizer(self) -> Iterator[Tensor]:
        for optimizer in optimizers(self.parts.optimizer) if self.parts.optimizer is not None else ():
            for parameter, state in optimizer.state.items():
                if optimizer.on_host(parameter):
                    continue
                yield from (tensor for tensor in state.values() if isinstance(tensor, Tensor))
                for name in optimizer.moment_names(parameter):
                    exponents = optimizer.moment(parameter, name).exponents
                    if exponents is not None:
                        yield exponents

    def _of_gradients(self) -> Iterator[Tensor]:
        if self.parts.optimizer is None:
            return
        for chunk in self.parts.chunks:
            yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """The whole storage as (N,) uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copied(tensor: Tensor) -> Tensor:
    """A copy of a tensor's whole storage on the host, pinned where it comes from a GPU."""
    whole = _bytes(tensor.untyped_storage())
    copy = torch.empty(whole.shape, dtype=torch.uint8, device="cpu", pin_memory=whole.is_cuda)
    return copy.copy_(whole, non_blocking=True)
