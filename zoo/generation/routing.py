"""The experts that tokens took while answers were made, for a training pass that takes the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.nn.decoder.experts.router import Routing
from zoo.packing import PackedLayout
from zoo.parallel.world import World


@dataclass
class RoutingNotes:
    """Experts of the tokens of some answers and their prompts.

    Where passes share no cache, each reads prompts and answers anew, and the last one is kept.
    """

    world: World
    sequence_parallel: bool  # tensor-parallel ranks share out the tokens of a pass
    layers: int  # of the model, with experts
    topk: int  # experts that a token takes
    _prompts: list[Tensor] = field(default_factory=list)  # of each answer, (tokens, L, k)
    _tokens: list[Tensor] = field(default_factory=list)  # of each pass, (answers or more, L, k)
    _by_answer: dict[int, Tensor] = field(
        default_factory=dict
    )  # by answer, (tokens, L, k) of the pass that read it last

    def prompts(self, routing: Routing | None, layout: PackedLayout, copies: int) -> None:
        """Note the pass that read the prompts."""
        pieces = self._whole(routing).split(list(layout.padded_lengths))
        for piece, length in zip(pieces, layout.lengths, strict=True):
            self._prompts += [piece[:length]] * copies

    def token(self, routing: Routing | None) -> None:
        """Note a pass that read one token of each answer."""
        self._tokens.append(self._whole(routing))

    def blank(self, tokens: int) -> Tensor:
        """(tokens, L, k) of a pass of so many tokens on all ranks, none noted yet."""
        return torch.full((tokens, self.layers, self.topk), -1, dtype=torch.int32, device=self.world.device)

    def put(self, noted: Tensor, routing: Routing | None, source: Tensor | None) -> None:
        """Put what this rank's layers took into `noted`; `source`: (N,) the place of each of its tokens there, -1 of padding."""
        assert routing is not None and source is not None
        if self.sequence_parallel:
            source = source.chunk(self.world.groups.tp.size())[self.world.tp_rank]
        known = source >= 0
        rows, known = source[known].to(noted.device), known.to(noted.device)
        for layer, taken in routing.noted.items():
            noted[rows, layer] = taken[known].to(noted.dtype)

    def whole_pass(self, noted: Tensor, numbers: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Take what all ranks have put there of a pass that read the answers of these numbers, with their prompts, from `starts` on."""
        for group in (self.world.groups.tp_cp, self.world.groups.pp):
            if group.size() > 1:  # each token's are on one rank, or alike on several, and -1 on the others
                dist.all_reduce(noted, op=dist.ReduceOp.MAX, group=group)
        whole = noted.to(torch.int16).cpu()
        for number, start, length in zip(numbers, starts, lengths, strict=True):
            self._by_answer[number] = whole[start : start + length]

    def experts_of(self, number: int, tokens: int) -> Tensor:
        """(prompt and answer tokens, L, k) int16 experts of an answer of so many tokens; -1 of its last token, which was not read."""
        if number in self._by_answer:
            known = self._by_answer[number]
            return torch.cat([known, torch.full_like(known[:1], -1)])
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
