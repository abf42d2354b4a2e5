"""A run's steps on a terminal, as a bar with loss, rate and time left; elsewhere as plain lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from tqdm import tqdm

from zoo.logging.terminal import live_line
from zoo.types import JsonObject

ACCURACY = "rewards/accuracies"  # of preference pairs
BATCH_RECALL = "batch_recall@1"  # of queries
# Scores of held-out rows: their titles, and those of which the first that an evaluation has is shown by kind.
TITLES = {
    ACCURACY: "accuracy of preferences",
    "exact_match": "exact match",
    "recall@1": "recall@1",
    "ndcg@10": "nDCG@10",
}
MAIN = ("exact_match", ACCURACY, "recall@1")
_LEAST, _MOST = 10, 30  # characters of the bar


class StepLine:
    """A live line on a terminal, a plain line every `every` steps elsewhere."""

    def __init__(self, total: int, done: int, every: int, stream: TextIO | None = None) -> None:
        self.total, self.first, self.every = total, done, every
        self._line = live_line(stream)
        self.live = self._line.live
        self.start = time.monotonic()
        # Of the terminal, and of the bar, whose width does not change with each number next to it.
        self._columns, self._width = 0, 0

    def step(self, metrics: JsonObject, note: str = "") -> None:
        """Show a step's metrics (`step`, `loss`, `lr`, `real_tokens`, `step_ms`, `pad_fraction`, `data_wait`) and `note`."""
        step = metrics["step"]
        rate = (time.monotonic() - self.start) / max(step - self.first, 1)
        tokens = metrics["real_tokens"] / max(metrics["step_ms"], 1e-3) * 1e3
        unit = "tok/s" if self.live else "real tokens/s"
        parts = [
            (f"step {step}/{self.total}", 0),
            (f"loss {metrics['loss']:.4f}", 0),
            *([(f"reward {metrics['reward']:.3f}", 0)] if "reward" in metrics else []),
            *([(f"acc {metrics[ACCURACY]:.0%}", 0)] if ACCURACY in metrics else []),
            *([(f"recall@1 {metrics[BATCH_RECALL]:.0%}", 0)] if BATCH_RECALL in metrics else []),
            (f"lr {metrics['lr']:.2e}", 3),
            (f"{tokens:,.0f} {unit}", 1),
            (f"pad {metrics['pad_fraction']:.1%}", 5),
            (f"data {metrics['data_wait']:.0%}", 4),
            (f"ETA {clock(rate * (self.total - step))}", 0),
            *([(note, 1)] if note else []),
        ]
        if self.live:
            self._line.show(self._with_bar(parts, step))
            if step == self.total:
                self._line.keep()
        elif step % self.every == 0 or step == self.total or step == self.first + 1:
            self.say("  ".join(part for part, _ in parts))

    def show(self, text: str) -> None:
        """The live line, on a terminal alone."""
        self._line.show(text)

    def say(self, text: str) -> None:
        """A line of its own, above the live one."""
        self._line.write(f"{text}\n")

    def _with_bar(self, parts: Sequence[tuple[str, int]], step: int) -> str:
        """The parts that fit into the terminal, and behind the first a bar in the room that is left."""
        columns = self._line.columns
        mark = "\0" * _LEAST
        text = fitting([parts[0], (mark, 2), *parts[1:]], columns)
        if mark not in text:
            return text
        fits = min(_LEAST + columns - len(text), _MOST)
        self._width = min(fits, self._width) if columns == self._columns else fits
        self._columns, width = columns, self._width
        plain = not (self._line.stream.encoding or "").lower().startswith("utf")
        bar = tqdm.format_meter(step, self.total, 0, ncols=width - 2, bar_format="{bar}", ascii=plain)
        return text.replace(mark, f"|{bar}|")


def fitting(parts: Sequence[tuple[str, int]], columns: int) -> str:
    """The parts of a line that fit: parts with the highest rank are dropped first, rank 0 always stays."""
    for most in sorted({rank for _, rank in parts}, reverse=True):
        text = "  ".join(part for part, rank in parts if rank <= most)
        if len(text) <= columns:
            break
    return text


def clock(seconds: float) -> str:
    """h:mm:ss or m:ss."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
