"""A loop's padded batch, read and cut into micro-batches of so many tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.data.processors.processor import Processor
from zoo.packing.binning import Bin, plan_bins
from zoo.packing.lengths import rows_from_mask
from zoo.steps.batch import HostBatch
from zoo.steps.shard import IGNORE
from zoo.types import JsonMapping, JsonObject

MASKS = ("loss_mask", "response_mask")  # two names for the same
MEDIA = ("media", "multi_modal_inputs")  # the same


class Prepared(dict[str, Tensor]):
    """Media of a row that are the step's tensors already, as zoo's own processor made them."""


@dataclass(frozen=True)
class Sparse:
    """The layers of a model that have experts: how many, and how many experts a token takes."""

    layers: int
    experts: int  # of a layer
    topk: int  # that a token takes


@dataclass(frozen=True)
class PaddedRows:
    """A batch of B rows, which may be none, padded to T tokens on either side, on the host."""

    input_ids: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) bool, True on real tokens
    labels: (
        Tensor | None
    )  # (B, T) int64, the token where its log-probability is wanted, else IGNORE; None: of all tokens
    lengths: tuple[int, ...]  # real tokens of each row
    media: tuple[Mapping[str, Tensor], ...]  # by row, as the family's step takes them
    temperature: float | Tensor  # of all rows, or (B,) float32
    tensors: JsonMapping  # the caller's batch
    experts: Tensor | None = None  # (B, T, L, k) int64, experts that are to be taken; None: routers choose

    @classmethod
    def read(
        cls, batch: JsonMapping, processor: Processor, temperature: float | Tensor = 1.0, sparse: Sparse | None = None
    ) -> PaddedRows:
        """Check a batch, as `zoo.Engine` describes it, and bring what the host needs of it to the host.

        Args:
            batch: the caller's, its tensors on any device.
            processor: the family's, which knows what the Hugging Face processor returns.
            temperature: a number above 0, or one for each row, (B,).
            sparse: the model's layers with experts; None where it has none.

        Raises:
            ValueError: a tensor is missing or has another shape, a row has no token or a hole, a temperature is not above 0, or
                experts are none of the model's.
        """
        for name in ("input_ids", "attention_mask"):
            if not isinstance(batch.get(name), Tensor):
                raise ValueError(f"the batch has no tensor {name}; wanted input_ids and attention_mask, both (B, T)")
        ids = batch["input_ids"].cpu()
        if ids.ndim != 2:
            shape = tuple(ids.shape)
            raise ValueError(f"the batch's input_ids have shape {shape}; (B, T) is wanted, a row for each sample")
        mask = _same_shape(batch["attention_mask"], "attention_mask", ids)
        lengths = rows_from_mask(mask)[0] if len(mask) else ()
        real = mask == 1
        wanted = _one_of(batch, MASKS)
        labels = None
        if wanted is not None:
            chosen = _same_shape(batch[wanted], wanted, ids)
            if bool(((chosen != 0) & (chosen != 1)).any()):
                raise ValueError(f"the batch's {wanted} holds values other than 0 and 1; multiply the loss by weights")
            labels = ids.masked_fill(~((chosen == 1) & real), IGNORE)
        heat = _temperature(temperature, len(ids))
        media = _media(batch, processor, len(ids))
        return cls(ids, real, labels, lengths, media, heat, batch, _experts(batch, ids, real, sparse))

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def targets(self) -> int:
        """Tokens whose log-probability is wanted; a row's first token has none."""
        tokens = self.mask if self.labels is None else self.labels != IGNORE
        first = self.mask & (self.mask.cumsum(dim=1) == 1)
        return int((tokens & ~first).sum())

    def take(self, rows: Sequence[int], filler: int) -> HostBatch:
        """A micro-batch of these rows, as `PackedStep.prepare` takes it; of no rows, one of the text token `filler` alone."""
        if not rows:
            token = torch.full((1, 1), filler)
            return HostBatch(token, None, torch.ones_like(token).bool(), None, {})
        index = torch.tensor(rows)
        media = [self.media[row] for row in rows]
        names = dict.fromkeys(name for tensors in media for name in tensors)
        joined = {name: torch.cat([tensors[name] for tensors in media if name in tensors]) for name in names}
        labels = None if self.labels is None else self.labels[index]
        return HostBatch(self.input_ids[index], labels, self.mask[index], None, joined)

    def temperatures(self, rows: Sequence[int]) -> float | Tensor:
        """The temperature of these rows: a number, or (b,)."""
        heat = self.temperature
        if not rows:
            return 1.0
        return heat[torch.tensor(rows)] if isinstance(heat, Tensor) else heat

    def routing(self, rows: Sequence[int]) -> Tensor | None:
        """(b, T, L, k) experts of these rows; None: routers choose."""
        return None if self.experts is None or not rows else self.experts[torch.tensor(rows)]

    def part(self, rows: Sequence[int], device: torch.device) -> JsonObject:
        """The caller's batch with these rows: tensors on `device` and lists that have one entry a row; the rest as it is."""
        parts: JsonObject = {}
        for name, value in self.tensors.items():
            if isinstance(value, Tensor) and value.ndim and len(value) == len(self):
                value = value[torch.tensor(rows, device=value.device)].to(device, non_blocking=True)
            elif isinstance(value, list | tuple) and len(value) == len(self):
                value = [value[row] for row in rows]
            parts[name] = value
        return parts


def bins_of(lengths: Sequence[int], budget: int, align: int) -> list[Bin]:
    """Rows of each micro-batch: up to `budget` tokens, each row padded to a multiple of `align`.

    Raises:
        ValueError: a row has more tokens than the budget.
    """
    for row, length in enumerate(lengths):
        if -(-length // align) * align > budget:
            raise ValueError(
                f"row {row} of the batch has {length} tokens (padded to a multiple of {align}), packing.budget is {budget}; "
                "give a larger packing.budget"
            )
    return [tuple(rows) for rows in plan_bins(lengths, budget, align, lookahead=max(1, len(lengths)))]


def _same_shape(value: object, name: str, ids: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != ids.shape:
        seen = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"the batch's {name} has shape {seen}, its input_ids {tuple(ids.shape)}; they must be the same"
        )
    return value.cpu()


def _one_of(batch: JsonMapping, names: Sequence[str]) -> str | None:
    present = [name for name in names if batch.get(name) is not None]
    if len(present) > 1:
        raise ValueError(f"the batch has both {' and '.join(present)}, two names for the same; leave one out")
    return present[0] if present else None


def _temperature(value: float | Tensor, rows: int) -> float | Tensor:
    heat = value.detach().float().cpu() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    if heat.ndim and heat.shape != (rows,):
        raise ValueError(f"temperature has shape {tuple(heat.shape)}; a number, or ({rows},) for the rows is wanted")
    if heat.numel() and not float(heat.min()) > 0:
        raise ValueError(f"temperature is {float(heat.min()):g}; a number above 0 is wanted")
    return heat if heat.ndim else float(heat)


def _media(batch: JsonMapping, processor: Processor, rows: int) -> tuple[Mapping[str, Tensor], ...]:
    name = _one_of(batch, MEDIA)
    if name is None:
        return ({},) * rows
    media = batch[name]
    if isinstance(media, Mapping) or len(media) != rows:
        seen = "a mapping" if isinstance(media, Mapping) else f"{len(media)} entries"
        raise ValueError(
            f"the batch's {name} is {seen}; wanted a list of {rows}, for each row what the Hugging Face processor returned of "
            "its media, or None"
        )
    empty: Mapping[str, Tensor] = {}
    made = (row if isinstance(row, Prepared) or not row else processor.media_tensors(row) for row in media)
    return tuple(tensors or empty for tensors in made)


def _experts(batch: JsonMapping, ids: Tensor, real: Tensor, sparse: Sparse | None) -> Tensor | None:
    routing = batch.get("routing")
    if routing is None:
        return None
    if sparse is None:
        raise ValueError("the batch has routing, but the model has no experts; leave it out")
    wanted = (*ids.shape, sparse.layers, sparse.topk)
    if not isinstance(routing, Tensor) or tuple(routing.shape) != wanted or routing.is_floating_point():
        seen = tuple(routing.shape) if isinstance(routing, Tensor) else type(routing).__name__
        raise ValueError(
            f"the batch's routing has shape {seen}; integers of shape {wanted} are wanted: rows, tokens, layers with experts, and "
            "experts of a token"
        )
    experts = routing.cpu().long()
    if not experts.numel():
        return experts
    if int(experts.max()) >= sparse.experts or int(experts.min()) < -1:
        raise ValueError(
            f"the batch's routing holds values from {int(experts.min())} to {int(experts.max())}; experts 0 to "
            f"{sparse.experts - 1} are wanted, or -1 where the router chooses"
        )
    ordered = experts[real].sort(dim=-1).values  # whatever stands in padding
    if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
        raise ValueError("the batch's routing names an expert twice for one token; each takes different ones")
    return experts
