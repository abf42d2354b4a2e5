"""What `zoo bench train` measures one after the other: ways to run the same samples, and the metrics of one."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median

from zoo.config.gpus import gpu_of_device
from zoo.data.sample import Sample
from zoo.errors import UserError
from zoo.packing import plan_bins
from zoo.packing.cost import ModelCost, train_factor
from zoo.types import JsonObject

WAYS = (
    "packed:N (N samples a row), row:TOKENS (rows filled by zoo's packer), padded:N, padded:NxWIDTH, hf:N, hf:NxWIDTH"
)
LOOKAHEAD = 256
LEAST_WARM, LEAST_TIMED = 4, 8  # steps


@dataclass(frozen=True)
class Setting:
    """One way to run the samples."""

    way: str  # packed, row, padded or hf
    number: int  # samples of a micro-batch; of `row`: tokens
    width: int | None = None  # of padded rows; None: of the longest
    backend: str = "torch"  # zoo's, or transformers' attention
    ranks: int = 1  # processes

    @classmethod
    def parse(cls, text: str) -> Setting:
        """`packed:8`, `row:16384`, `padded:4`, `padded:2x2048`, `hf:4`; UserError for anything else."""
        match = re.fullmatch(r"(packed|row|padded|hf):(\d+)(?:x(\d+))?", text)
        if not match or int(match[2]) < 1 or (match[3] and match[1] in ("packed", "row")):
            raise UserError(f"settings: {text!r} is none; wanted {WAYS}")
        width = int(match[3]) if match[3] else None
        return cls(match[1], int(match[2]), width, "sdpa" if match[1] == "hf" else "torch")

    @property
    def name(self) -> str:
        """The setting as it is typed: `packed:8`, `padded:2x2048`."""
        return f"{self.way}:{self.number}" + (f"x{self.width}" if self.width else "")

    @property
    def packed(self) -> bool:
        """Whether samples lie end to end."""
        return self.way in ("packed", "row")

    def bins(self, samples: Sequence[Sample], align: int, costs: Sequence[int]) -> list[list[int]]:
        """Which samples go into each micro-batch."""
        if self.way == "row":
            bins = list(plan_bins([s.length for s in samples], self.number, align, LOOKAHEAD, costs))
            # The last rows are what the look-ahead was left with; a stream has no such end.
            tokens = [sum(samples[i].length for i in rows) for rows in bins]
            return [rows for rows, count in zip(bins, tokens, strict=True) if count > 0.9 * max(tokens)]
        each = self.number
        return [list(range(first, first + each)) for first in range(0, len(samples) - each + 1, each)]


def missing(backend: str) -> str | None:
    """Why a backend can't be measured here, or None."""
    if backend == "te" and importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    return None


def peak_flops(gpu: str) -> float | None:
    """Dense bf16 FLOPs a second of the GPU of that name; None where it isn't known."""
    known = gpu_of_device(gpu)
    return known.tflops * 1e12 if known and known.tflops else None


def train_flops(
    cost: ModelCost, lengths: Sequence[int], labels: int, rows: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """FLOPs of a training step by part, as the model needs them: three times those of a forward pass.

    What is computed on padding, in logits of tokens without loss, or again in the backward pass, is not in it.

    Args:
        lengths: tokens of each sample.
        labels: tokens with loss, of all samples.
        rows: tower -> rows of each item of their media, as `ModelCost.parts` takes them.
    """
    return {name: train_factor() * flops for name, flops in cost.parts(lengths, labels, rows).items()}


@dataclass(frozen=True)
class Timed:
    """One timed step of all ranks together."""

    ms: float
    samples: int
    real_tokens: int
    total_tokens: int
    flops: dict[str, float]
    waited_ms: float = 0.0  # for data


def metrics(setting: Setting, steps: Sequence[Timed], gpu: str, *, loaded: bool = False) -> JsonObject:
    """What a line of the table shows: medians of the steps' times, and rates over whole passes.

    Steps take different samples, so a rate is what all of them hold over what all would take at their median time a token.
    Where the loader brought them (`loaded`), it is over the time they took, waiting included.
    """
    times = sorted(step.ms for step in steps)
    per_token = median(step.ms / step.real_tokens for step in steps)
    seconds = per_token * sum(step.real_tokens for step in steps) / 1e3
    waits = {}
    if loaded:
        seconds = sum(times) / 1e3
        waits["data_wait"] = round(sum(step.waited_ms for step in steps) / sum(times), 4)
        waits["data_wait_max"] = round(max(step.waited_ms / step.ms for step in steps), 4)
    peak, parts = peak_flops(gpu), {name: sum(step.flops[name] for step in steps) for name in steps[0].flops}
    mfu = {name: flops / (seconds * peak * setting.ranks) for name, flops in parts.items()} if peak else None
    return {
        "ms": round(median(times), 2),
        "ms_quartiles": [round(times[len(times) // 4], 2), round(times[min(len(times) - 1, 3 * len(times) // 4)], 2)],
        "ms_max": round(times[-1], 2),
        "steps": len(steps),
        "samples_per_step": round(mean(step.samples for step in steps), 2),
        "tokens_per_step": round(mean(step.total_tokens for step in steps)),
        "real_tokens_per_step": round(mean(step.real_tokens for step in steps)),
        "real_share": round(sum(s.real_tokens for s in steps) / sum(s.total_tokens for s in steps), 4),
        "real_tokens_per_s": round(sum(step.real_tokens for step in steps) / seconds, 1),
        "samples_per_s": round(sum(step.samples for step in steps) / seconds, 3),
        "tflop_per_step": {name: round(flops / len(steps) / 1e12, 4) for name, flops in parts.items()},
        "mfu": round(sum(mfu.values()), 4) if mfu else None,
        "mfu_parts": {name: round(share, 4) for name, share in mfu.items()} if mfu else None,
        "peak_tflops": peak / 1e12 if peak else None,
        **waits,
    }


def as_dict(setting: Setting) -> JsonObject:
    """The setting as JSON takes it."""
    return {"name": setting.name, **asdict(setting)}
