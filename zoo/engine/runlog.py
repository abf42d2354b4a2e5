"""What a run tells: a progress line, `train.jsonl`, TensorBoard, the environment, the loss plot, the summary."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from zoo.config.compose import save_recipe
from zoo.config.schema import Recipe

PACKAGES = (
    "torch", "megatron-core", "transformers", "transformer-engine", "flash-linear-attention", "triton",
    "safetensors", "omegaconf", "numpy", "av",
)  # fmt: skip


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or none."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def environment() -> dict[str, Any]:
    """Versions and machine, as far as they can matter for a result."""
    import torch

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"python": platform.python_version(), "system": platform.platform(), "gpus": gpus, "packages": versions}


class RunLog:
    """Log of the main rank; on other ranks every method does nothing."""

    def __init__(self, recipe: Recipe, total_steps: int, done: int, *, main: bool) -> None:
        """`done`: steps a run that goes on has behind it; later lines of its log are dropped."""
        assert recipe.run.dir is not None
        self.main = main
        self.folder = Path(recipe.run.dir)
        self.recipe = recipe
        self.total_steps = total_steps
        self.progress = Progress(total_steps, done, recipe.train.log_every)
        self.board: Any = None
        self.wandb: Any = None
        if not main:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        save_recipe(recipe, self.folder / "config.yaml")
        write_atomically(self.folder / "env.json", json.dumps(environment(), indent=2) + "\n")
        self._forget_after(done)
        self._file = (self.folder / "train.jsonl").open("a", encoding="utf-8")
        self._open_trackers(done)

    def _forget_after(self, done: int) -> None:
        """Drop lines of steps that will be done again."""
        path = self.folder / "train.jsonl"
        if not path.is_file():
            return
        kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= done]
        write_atomically(path, "".join(f"{line}\n" for line in kept))

    def _open_trackers(self, done: int) -> None:
        if self.recipe.log.tensorboard:
            from torch.utils.tensorboard.writer import SummaryWriter

            self.board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=done + 1)
        if self.recipe.log.wandb:
            import wandb

            self.wandb = wandb.init(project=self.recipe.log.wandb, dir=str(self.folder), resume="allow")

    def step(self, figures: dict[str, Any]) -> None:
        """One optimizer step: a line in train.jsonl, the trackers, the progress line."""
        if not self.main:
            return
        self._line(figures)
        self._track("train", figures)
        self.progress.step(figures)

    def evaluation(self, step: int, figures: dict[str, Any]) -> None:
        """One evaluation."""
        if not self.main:
            return
        self._line({"event": "eval", "step": step, **figures})
        flat = {f"exact_match_{kind}": f["exact_match"] for kind, f in figures["by_kind"].items()}
        self._track("eval", {"step": step, "loss": figures["loss"], "exact_match": figures["exact_match"], **flat})
        kinds = ", ".join(f"{k} {f['exact_match']:.1%} of {f['rows']}" for k, f in figures["by_kind"].items())
        self.say(
            f"eval at step {step}: loss {figures['loss']:.4f}, exact match {figures['exact_match']:.1%} ({kinds})"
        )

    def event(self, name: str, step: int, **facts: Any) -> None:
        """Something that happened, for the log alone."""
        if self.main:
            self._line({"event": name, "step": step, **facts})

    def say(self, text: str) -> None:
        """A line for the person watching."""
        if self.main:
            self.progress.say(text)

    def _line(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def _track(self, prefix: str, figures: dict[str, Any]) -> None:
        numbers = {k: v for k, v in figures.items() if isinstance(v, (int, float)) and k != "step"}
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(f"{prefix}/{name}", value, figures["step"])
        if self.wandb is not None:
            self.wandb.log({f"{prefix}/{k}": v for k, v in numbers.items()}, step=figures["step"])

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json and the plot, close everything."""
        if not self.main:
            return
        self._file.close()
        write_atomically(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        plot_losses(self.folder)
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line).get("step", 0))
    except ValueError:  # a line that a killed run left half-written
        return float("inf")


class Progress:
    """A live line on a terminal, a plain line every `every` steps elsewhere."""

    def __init__(self, total: int, done: int, every: int, stream: TextIO | None = None) -> None:
        self.total, self.first, self.every = total, done, every
        self.stream = stream or sys.stdout
        self.live = self.stream.isatty()
        self.start = time.monotonic()
        self.shown = ""

    def step(self, figures: dict[str, Any]) -> None:
        """Show a step's figures."""
        step = figures["step"]
        rate = (time.monotonic() - self.start) / max(step - self.first, 1)
        tokens = figures["real_tokens"] / max(figures["step_ms"], 1e-3) * 1e3
        text = (
            f"step {step}/{self.total}  loss {figures['loss']:.4f}  lr {figures['lr']:.2e}  "
            f"{tokens:,.0f} real tokens/s  pad {figures['pad_fraction']:.1%}  "
            f"ETA {clock(rate * (self.total - step))}"
        )
        if self.live:
            width = shutil.get_terminal_size().columns
            self.stream.write("\r\x1b[2K" + text[: width - 1])
            self.stream.flush()
            self.shown = text
        elif step % self.every == 0 or step == self.total or step == self.first + 1:
            print(text, file=self.stream, flush=True)

    def say(self, text: str) -> None:
        """A line of its own, above the live one."""
        if self.live and self.shown:
            self.stream.write("\r\x1b[2K")
        print(text, file=self.stream, flush=True)


def clock(seconds: float) -> str:
    """h:mm:ss or m:ss."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def plot_losses(folder: Path) -> Path | None:
    """plots/loss.png from train.jsonl: training loss, evaluation loss and exact match by step."""
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [r for r in records if "event" not in r]
    evals = [r for r in records if r.get("event") == "eval"]
    if not steps:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    x, y = [r["step"] for r in steps], [r["loss"] for r in steps]
    axis.plot(x, y, color="tab:blue", alpha=0.35, linewidth=1, label="training loss")
    axis.plot(x, _smooth(y), color="tab:blue", linewidth=2, label="training loss, smoothed")
    axis.set_xlabel("optimizer step")
    axis.set_ylabel("loss (nats a label)")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    handles, labels = axis.get_legend_handles_labels()
    if evals:
        axis.plot([r["step"] for r in evals], [r["loss"] for r in evals], "o-", color="tab:orange", label="eval loss")
        right = axis.twinx()
        for kind in sorted({k for r in evals for k in r["by_kind"]}):
            points = [(r["step"], r["by_kind"][kind]["exact_match"]) for r in evals if kind in r["by_kind"]]
            right.plot(*zip(*points, strict=True), ".--", linewidth=1, label=f"exact match: {kind}")
        right.set_ylim(0, 1.02)
        right.set_ylabel("exact match on held-out rows")
        handles, labels = (a + b for a, b in zip(axis.get_legend_handles_labels(), right.get_legend_handles_labels(), strict=True))
    axis.legend(handles, labels, fontsize=8, loc="center right")
    axis.set_title(folder.name)
    path = folder / "plots" / "loss.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _smooth(values: list[float], weight: float = 0.95) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smoothed, average = [], 0.0
    for i, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        smoothed.append(average / (1 - weight**i))
    return smoothed
