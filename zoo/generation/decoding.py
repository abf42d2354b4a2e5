"""`Decoding`: the forward passes that make answers, several prompts at once.

With a cache (`zoo.nn.decoder.attention.cache`), the prompts are read in one packed pass, and each further pass takes one token of
each answer. Without, every pass reads prompts and answers anew: slower by about the tokens of a sequence, but right under
every parallel layout. Pipeline and context parallel ranks go that way. Both give the same tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.config.schema import Recipe
from zoo.data.loading.batches import make_batch
from zoo.data.sample import IGNORE, MicroBatch, Sample
from zoo.generation.prompts import most_positions
from zoo.generation.routing import RoutingNotes
from zoo.generation.sampling import Answers, Sampling
from zoo.model import build
from zoo.nn.decoder.attention.cache import DecodeCache
from zoo.nn.decoder.attention.self_attention import SeqParams
from zoo.nn.decoder.experts.router import Routing
from zoo.nn.inputs import ModelInputs
from zoo.packing import PackedLayout
from zoo.parallel.world import World

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


@dataclass(frozen=True)
class Decoding:
    """Makes answers with a model on this rank, in evaluation mode."""

    assembly: build.Assembly
    chunks: Sequence[MegatronModule]
    recipe: Recipe  # parallel sizes and packing.align are used
    world: World
    sampling: Sampling
    ends: Collection[int]  # tokens that end an answer
    cached: bool | None = None  # keep keys, values and states between passes; default: where the layout allows it

    @cached_property
    def step(self) -> Any:
        """The family's step, on packed rows of any length."""
        packing = {"packing.mode": "thd", "packing.pad_to": None}
        step = build.build_step(self.assembly, self.recipe.replace(packing), self.world)
        step.vocabulary = None  # tokens of answers are marked by negative ids, and have rows as the model chose them
        return step

    @property
    def align(self) -> int:
        """Multiple that each prompt, and the tokens of a pass, are padded to."""
        return self.recipe.packing.align or 1

    @property
    def keeps_cache(self) -> bool:
        """Whether passes share a cache: not over pipeline stages or context parallel ranks."""
        whole = self.recipe.parallel.pp == self.recipe.parallel.cp == 1
        return whole if self.cached is None else self.cached and whole

    @property
    def together(self) -> bool:
        """Whether data-parallel ranks must take each pass together: for experts, or to exchange tokens."""
        return self.world.dp_size > 1 and (self.recipe.parallel.ep > 1 or not self.keeps_cache)

    def answer(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[list[int]]:
        """Tokens of each prompt's answer, its end token included; arguments as `answers` has them."""
        return self.answers(samples, rows).tokens

    @torch.no_grad()
    def answers(
        self, samples: Sequence[Sample], rows: Sequence[int], copies: int = 1, routing: RoutingNotes | None = None
    ) -> Answers:
        """`copies` answers to each prompt, side by side.

        Args:
            samples: prompts, which are read once with a cache.
            rows: the number of each answer, for draws at random.
            copies: answers to a prompt.
            routing: notes the experts of all tokens.
        """
        most = most_positions(self.assembly.config)
        each = [sample for sample in samples for _ in range(copies)]
        answers = Answers([min(self.sampling.max_new_tokens, most - sample.length) for sample in each], self.ends)
        if self.keeps_cache:
            self._with_cache(samples, rows, answers, copies, routing)
        else:
            self._recompute(each, rows, answers, routing)
        return answers

    def any(self, flag: bool, everywhere: bool = False) -> bool:
        """Whether the flag is set, here or on any rank that takes passes together with this one; `everywhere`: on any rank, all of which ask."""
        return self.world.sum([float(flag)])[0] > 0 if everywhere or self.together else flag

    def _with_cache(
        self,
        samples: Sequence[Sample],
        rows: Sequence[int],
        answers: Answers,
        copies: int,
        routing: RoutingNotes | None,
    ) -> None:
        """Read the prompts, then a token of each answer a pass."""
        experts = None if routing is None else "noted"
        inputs, _ = self.step.prepare(self._batch(samples), logits="last", experts=experts)
        params = inputs.seq_params
        assert isinstance(params, SeqParams) and params.layout is not None
        further = self.sampling.max_new_tokens if self.together else max(answers.limits)
        cache = DecodeCache(len(samples), max(params.layout.lengths) + further)
        params.cache = cache
        logits = self.step.forward(self.chunks[0], inputs)
        cache.prompts_read(params.layout, logits.device)
        position = next_positions(inputs.positions, params.layout)
        if routing is not None:
            routing.prompts(inputs.routing, params.layout, copies)
        if copies > 1:
            cache.repeat(copies)
            logits, position = logits.repeat_interleave(copies, dim=0), position.repeat_interleave(copies, dim=1)
        for count in itertools.count():
            picks = self.sampling.pick(logits, rows, count)
            for number, pick in enumerate(zip(*picks, strict=True)):
                answers.add(number, *pick)
            if not self.any(bool(answers.growing)):
                return
            inputs = self._next_inputs(picks.tokens, position, cache)
            if routing is not None:
                inputs = replace(inputs, routing=Routing())
            logits = self.step.forward(self.chunks[0], inputs)
            cache.token_read()
            position = position + 1
            if routing is not None:
                routing.token(inputs.routing)

    def _next_inputs(self, tokens: Sequence[int], position: Tensor, cache: DecodeCache) -> ModelInputs:
        """One token of each sequence, padded to a multiple of `align`."""
        count = len(tokens)
        layout = PackedLayout.from_lengths([1] * count, 1, -(-count // self.align) * self.align)
        params = SeqParams.from_layout(layout.to(position.device))
        params.cache = cache
        padding = layout.total - count
        ids = torch.tensor([*tokens, *[self.assembly.processor.pad_id] * padding])[None].to(position.device)
        positions = torch.nn.functional.pad(position, (0, padding))[:, None]
        mask = layout.padding_mask.to(position.device) if padding else None
        rows = torch.arange(count, device=position.device)
        return ModelInputs(ids, positions, mask, params, label_rows=rows)

    def _recompute(
        self, samples: Sequence[Sample], rows: Sequence[int], answers: Answers, routing: RoutingNotes | None
    ) -> None:
        """Read prompts and answers so far anew for each token."""
        for count in itertools.count():
            growing = answers.growing
            if not self.any(bool(growing)):
                return
            numbers = growing or [0]
            grown = [_grown(samples[number], answers.tokens[number]) for number in numbers]
            logits = self._last_logits(self._batch(grown), routing, growing)
            picks: dict[int, tuple[int, float]] = {}
            if logits:
                table = torch.stack(list(logits.values()))
                chosen = self.sampling.pick(table, [rows[numbers[segment]] for segment in logits], count)
                picks = dict(zip(logits, zip(*chosen, strict=True), strict=True))
            if self.world.size > 1:  # of ranks with the same samples, some have the logits
                everyone: list[tuple[int, dict[int, tuple[int, float]]]] = [(0, {})] * self.world.size
                dist.all_gather_object(everyone, (self.world.dp_rank, picks))
                picks = {s: t for rank, tokens in everyone if rank == self.world.dp_rank for s, t in tokens.items()}
            for segment, pick in picks.items():
                answers.add(numbers[segment], *pick)

    def _last_logits(
        self, batch: MicroBatch, routing: RoutingNotes | None, numbers: Sequence[int]
    ) -> dict[int, Tensor]:
        """Segment -> logits (vocab,) behind its last token, where this rank has them; one pass through all stages.

        `routing` notes the experts of the answers of these numbers, which the batch holds; none: it is not kept.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        noted, experts = (None, None) if routing is None else (routing.blank(batch.total), "noted")

        def forward(data: Iterator[MicroBatch], model: MegatronModule) -> object:
            inputs, loss_inputs = self.step.prepare(next(data), logits="last", experts=experts)
            ids = inputs.input_ids
            output = self.step.forward(model, replace(inputs, input_ids=torch.where(ids < 0, -1 - ids, ids)))
            if routing is not None and noted is not None:
                routing.put(noted, inputs.routing, loss_inputs.token_source)
            return output, lambda output: (output.sum(), {"logits": output, "of": loss_inputs.label_segments})

        many = len(self.chunks) > 1
        results = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[itertools.repeat(batch) for _ in self.chunks] if many else itertools.repeat(batch),
            model=list(self.chunks),
            num_microbatches=self.world.pp_size if many else 1,
            seq_length=batch.input_ids.shape[1],
            micro_batch_size=1,
            forward_only=True,
        )
        if routing is not None and noted is not None and numbers:
            routing.whole_pass(noted, numbers, batch.starts, batch.lengths)
        if not results:
            return {}
        return dict(zip(results[0]["of"].tolist(), results[0]["logits"].float(), strict=True))

    def _batch(self, samples: Sequence[Sample]) -> MicroBatch:
        return make_batch(samples, "thd", self.align, None, self.assembly.processor.pad_id)


def _grown(sample: Sample, tokens: Sequence[int]) -> Sample:
    """The sample with an answer, whose tokens are marked: a placeholder in an answer stands for no medium."""
    ids = torch.cat((sample.input_ids, sample.input_ids.new_tensor(tokens).neg() - 1))
    return replace(sample, input_ids=ids, labels=torch.full_like(ids, IGNORE))


def next_positions(positions: Tensor, layout: PackedLayout) -> Tensor:
    """(A, S) position of the token behind each prompt, of the positions (A, 1, T) of the packed prompts.

    It is one above the largest of the prompt on any axis, which text goes on from on all axes: what transformers keeps as
    `rope_deltas`.
    """
    pieces = positions[:, 0].split(list(layout.padded_lengths), dim=1)
    nexts = [piece[:, :length].max() + 1 for piece, length in zip(pieces, layout.lengths, strict=True)]
    return torch.stack(nexts).expand(len(positions), -1)
