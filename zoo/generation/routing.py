"""The experts that tokens took while answers were made, for a training pass that takes the same ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.nn.decoder.experts.router import Routing
from zoo.packing import PackedLayout
from zoo.parallel.world import World


@dataclass
class RoutingNotes:
    """Experts of the tokens of some answers and their prompts, on a rank that has all layers."""

    world: World
    sequence_parallel: bool  # tensor-parallel ranks share out the tokens of a pass
    _prompts: list[Tensor] = field(default_factory=list)  # of each answer, (tokens, L, k)
    _tokens: list[Tensor] = field(default_factory=list)  # of each pass, (answers or more, L, k)

    def prompts(self, routing: Routing | None, layout: PackedLayout, copies: int) -> None:
        """Note the pass that read the prompts."""
        pieces = self._whole(routing).split(list(layout.padded_lengths))
        for piece, length in zip(pieces, layout.lengths, strict=True):
            self._prompts += [piece[:length]] * copies

    def token(self, routing: Routing | None) -> None:
        """Note a pass that read one token of each answer."""
        self._tokens.append(self._whole(routing))

    def experts_of(self, number: int, tokens: int) -> Tensor:
        """(prompt and answer tokens, L, k) int16 experts of an answer of so many tokens; -1 of its last token, which was not read."""
        read = [passed[number : number + 1] for passed in self._tokens[: tokens - 1]]
        known = torch.cat([self._prompts[number], *read])
        return torch.cat([known, torch.full_like(known[:1], -1)])[: len(self._prompts[number]) + tokens]

    def _whole(self, routing: Routing | None) -> Tensor:
        """(tokens, L, k) int16 on the host, of all tokens of a pass."""
        assert routing is not None
        local = torch.stack([routing.noted[layer] for layer in sorted(routing.noted)], dim=1).to(torch.int32)
        if self.sequence_parallel:
            shares = [torch.empty_like(local) for _ in range(self.world.groups.tp.size())]
            dist.all_gather(shares, local.contiguous(), group=self.world.groups.tp)
            local = torch.cat(shares)
        return local.to(torch.int16).cpu()
