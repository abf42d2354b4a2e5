"""The log of a run: progress line, `train.jsonl`, environment, loss plot, summary."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from zoo.config.compose import save_recipe
from zoo.config.schema import Recipe
from zoo.data.media.decoding_workers import decoder_for
from zoo.files import Lines, finite, write_atomically
from zoo.logging import messages
from zoo.logging.loss_plot import plot_losses
from zoo.logging.predictions_plot import Prediction, block, plot_predictions
from zoo.logging.progress_line import MAIN, TITLES, StepLine
from zoo.packages import installed_version
from zoo.records import is_count, line_of_json
from zoo.types import JsonObject

PACKAGES = (
    "torch", "megatron-core", "transformers", "transformer-engine", "flash-linear-attention", "flash-qla", "flash-attn-4", "quack-kernels", "triton",
    "safetensors", "omegaconf", "numpy", "av",
)  # fmt: skip

PREDICTIONS = "predictions.jsonl"


def environment() -> JsonObject:
    """Versions and machine, which results may depend on."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    packages = {name: installed_version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "system": platform.platform(), "gpus": gpus, "packages": packages}


def append_event(folder: Path, name: str, step: int, **fields: object) -> None:
    """Write an event to an existing train.jsonl, for callers without the :class:`RunLog`."""
    path = folder / "train.jsonl"
    if path.is_file():
        with path.open("a", encoding="utf-8") as file:
            file.write(_timed({"event": name, "step": step, **fields}) + "\n")


def has_ended(folder: Path) -> bool:
    """Whether the log's last line is the end of the run (a resumed run writes more lines after it)."""
    path = folder / "train.jsonl"
    if not path.is_file():
        return False
    last = path.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
    return any(line.startswith('{"event": "end"') for line in last)


def _timed(record: JsonObject) -> str:
    """A line of train.jsonl; `time` is in seconds since 1970."""
    return json.dumps(finite({**record, "time": round(time.time(), 3)}))


class RunLog:
    """Log of the main rank; on other ranks every method does nothing."""

    def __init__(self, recipe: Recipe, total_steps: int, done: int, *, main: bool) -> None:
        """`done`: steps that a resumed run has behind it; later lines of its log are dropped."""
        assert recipe.run.dir is not None
        self.main = main
        self.folder = Path(recipe.run.dir)
        self.recipe = recipe
        self.total_steps = total_steps
        self.progress = StepLine(total_steps, done, recipe.train.log_every)
        self._told_total = total_steps
        if not main:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        save_recipe(recipe, self.folder / "config.yaml")
        write_atomically(self.folder / "env.json", json.dumps(environment(), indent=2) + "\n")
        self._forget_after(done)
        self._file = Lines(self.folder / "train.jsonl")

    def _forget_after(self, done: int) -> None:
        """Drop lines of steps that will be repeated; the events that earlier starts ended with stay."""
        for path in (self.folder / "train.jsonl", self.folder / PREDICTIONS):
            if not path.is_file():
                continue
            kept = []
            for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
                record = line_of_json(line) or {"step": None}  # of a line that a killed run left half-written
                step = record.get("step", 0)
                if record.get("event") == "end" or (is_count(step) and step <= done):
                    kept.append(f"{line}\n")
            write_atomically(path, "".join(kept))

    def step(self, metrics: JsonObject, save: object = None) -> None:
        """One optimizer step: a line in train.jsonl, the progress line; `save`: the one under way, as text."""
        if self.main:
            self._line(metrics)
            self.progress.step(metrics, "" if save is None else str(save))

    def correct_total(self, step: int, total_steps: int) -> None:
        """Go by another number of steps from now on; said where it is over 1 % off what was said last, or at the last step."""
        if not self.main or total_steps == self.total_steps == self._told_total:
            return
        self.total_steps = self.progress.total = total_steps
        change = abs(total_steps - self._told_total)
        if change > max(1, self._told_total // 100) or (change and step >= total_steps):
            self.event("total_steps", min(step, total_steps), total_steps=total_steps)
            self.say(f"train.epochs comes to {total_steps} steps, not {self._told_total}, by the rows so far")
            self._told_total = total_steps

    def evaluation(self, step: int, metrics: JsonObject, data: list[str]) -> None:
        """One evaluation; `data`: the entries of data.eval."""
        if not self.main:
            return
        self._line({"event": "eval", "step": step, **metrics, "data": data})
        score = next(name for name in MAIN if name in metrics)  # models without a head say nothing
        kinds = ", ".join(f"{k} {f[score]:.1%} of {f['rows']}" for k, f in metrics["by_kind"].items())
        scores = "".join(f", {title} {metrics[name]:.1%}" for name, title in TITLES.items() if name in metrics)
        first = f"loss {metrics['loss']:.4f}" if "loss" in metrics else f"reward {metrics['reward']:.4f}"
        self.say(f"eval at step {step}: {first}{scores} ({kinds})")

    def predictions(self, step: int, predictions: Sequence[Prediction]) -> tuple[Path, str] | None:
        """Answers to some held-out rows: a block of lines, predictions.jsonl and the plot; returns plot and block."""
        if not self.main or not predictions:
            return None
        with contextlib.closing(Lines(self.folder / PREDICTIONS)) as lines:
            for prediction in predictions:
                lines.write(json.dumps({"step": step, **prediction.as_dict()}, ensure_ascii=False))
        text = block(step, predictions)
        self.say(text)
        return plot_predictions(self.folder, step, predictions, decoder_for(self.recipe.data)), text

    def event(self, name: str, step: int, **fields: object) -> None:
        """An event, for the log alone."""
        if self.main:
            self._line({"event": name, "step": step, **fields})

    def say(self, text: str) -> None:
        """A message to the person watching."""
        if self.main:
            self.progress.say(text)

    def note(self, text: str) -> None:
        """A passing message on a terminal, replaced by the next line."""
        if self.main:
            self.progress.show(text)

    def _line(self, record: JsonObject) -> None:
        self._file.write(_timed(record))

    def finish(self, summary: JsonObject, reason: str, why: str | None = None) -> None:
        """Write the log's last line, summary.json and the plot; `why`: of a run that a callback stopped."""
        if not self.main:
            return
        self._line({"event": "end", "step": summary["steps"], "reason": reason, **({"why": why} if why else {})})
        self._file.close()
        write_atomically(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        plot_losses(self.folder)


class RowCounts:
    """What the log has of them; `budget` is packing.budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._left_out: dict[str, int] = {}
        self._shrunk = 0

    def note(self, log: RunLog, step: int, left_out: Mapping[str, int], shrunk: int) -> None:
        """Log what has changed up to this step: rows left out by cause, and rows made smaller."""
        left_out = dict(left_out)
        if left_out != self._left_out:
            log.event("rows_left_out", step, counts=left_out)
            self._left_out = left_out
        if shrunk != self._shrunk:
            if not self._shrunk:
                log.say(messages.at_shrinking(shrunk, self.budget))
            log.event("rows_shrunk", step, count=shrunk)
            self._shrunk = shrunk
