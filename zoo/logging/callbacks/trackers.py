"""Trackers of experiments as callbacks: TensorBoard, Weights & Biases, MLflow, Trackio, SwanLab and Comet.

Each is imported when a recipe asks for it (`log.tensorboard`, `log.wandb` ...). Metrics of steps are named
`train/NAME`, those of evaluations `eval/NAME`. A resumed run goes on in the run that it had there: its name is in the checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from zoo.config.foreign.reader import flattened
from zoo.config.schema import Recipe
from zoo.files import finite
from zoo.logging.callbacks.event import Event
from zoo.types import JsonMapping, JsonObject


def trackers(recipe: Recipe) -> Iterator[tuple[str, object]]:
    """The trackers that a recipe asks for, by the key that does."""
    log = recipe.log
    if log.tensorboard:
        yield "log.tensorboard", TensorBoard()
    if log.wandb:
        yield "log.wandb", Wandb(log.wandb)
    if log.mlflow:
        yield "log.mlflow", MLflow(log.mlflow)
    if log.trackio:
        yield "log.trackio", Trackio(log.trackio)
    if log.swanlab:
        yield "log.swanlab", SwanLab(log.swanlab)
    if log.comet:
        yield "log.comet", Comet(log.comet)


class Tracker(ABC):
    """Hands the numbers of steps and evaluations to `log`; `run`: its name for the run, for the checkpoint."""

    run: str | None = None

    @abstractmethod
    def log(self, numbers: dict[str, float], step: int) -> None:
        """Take metrics by their full names."""

    def on_step(self, event: Event) -> None:
        self.log(_numbers("train", event.metrics), event.step)

    def on_eval(self, event: Event) -> None:
        self.log(_numbers("eval", event.metrics), event.step)

    def state_dict(self) -> JsonObject:
        return {"run": self.run}

    def load_state_dict(self, state: JsonMapping) -> None:
        self.run = state["run"]


class TensorBoard(Tracker):
    """Event files in run.dir/tensorboard; a resumed run drops those of steps that it repeats."""

    def on_start(self, event: Event) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._board = SummaryWriter(str(event.run_dir / "tensorboard"), purge_step=event.step + 1)

    def log(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)

    def on_predictions(self, event: Event) -> None:
        from PIL import Image

        assert event.picture is not None and event.text is not None
        with Image.open(event.picture) as image:
            pixels = np.asarray(image.convert("RGB"))
        self._board.add_image("predictions", pixels, event.step, dataformats="HWC")
        self._board.add_text("predictions", "    " + event.text.replace("\n", "\n    "), event.step)

    def on_end(self, event: Event) -> None:
        self._board.close()


class _ProjectRun(Tracker):
    """A run of a project, `_run`, as W&B, Trackio and SwanLab have it."""

    _run: Any

    def __init__(self, project: str) -> None:
        self._project = project

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def on_end(self, event: Event) -> None:
        self._run.finish()


class Wandb(_ProjectRun):
    """A run of a project at Weights & Biases; its own variables (WANDB_MODE=offline) hold."""

    def on_start(self, event: Event) -> None:
        import wandb

        config, folder = _plain(event.recipe), str(event.run_dir)
        self._run = wandb.init(project=self._project, dir=folder, id=self.run, resume="allow", config=config)
        self.run = self._run.id

    def on_predictions(self, event: Event) -> None:
        import wandb

        self._run.log({"predictions": wandb.Image(str(event.picture))}, step=event.step)


class MLflow(Tracker):
    """A run of an experiment; where it is kept, MLFLOW_TRACKING_URI says, as for MLflow itself."""

    def __init__(self, experiment: str) -> None:
        self._experiment = experiment

    def on_start(self, event: Event) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(self._experiment)
        fresh = self.run is None
        started = mlflow.start_run(run_id=self.run, run_name=event.run_dir.name if fresh else None)
        self.run = started.info.run_id
        if fresh:
            flat = dict(flattened(asdict(event.recipe)))
            mlflow.log_params({name: str(value)[:500] for name, value in flat.items()})

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(numbers, step=step)

    def on_end(self, event: Event) -> None:
        states = {"failed": "FAILED", "interrupted": "KILLED", "preempted": "KILLED"}
        self._mlflow.end_run(states.get(event.reason or "", "FINISHED"))


class Trackio(_ProjectRun):
    """A run of a local Trackio project; `trackio show` displays it."""

    def on_start(self, event: Event) -> None:
        import trackio

        resume = "never" if self.run is None else "allow"
        self._run = trackio.init(project=self._project, name=self.run, config=_plain(event.recipe), resume=resume)
        self.run = self._run.name


class SwanLab(_ProjectRun):
    """A run of a project at SwanLab; its own variables (SWANLAB_MODE=offline) hold."""

    def on_start(self, event: Event) -> None:
        import swanlab

        folder = str(event.run_dir / "swanlab")
        self._run = swanlab.init(
            project=self._project, log_dir=folder, id=self.run, resume="allow", config=_plain(event.recipe)
        )
        self.run = self._run.id

    def on_predictions(self, event: Event) -> None:
        import swanlab

        self._run.log({"predictions": swanlab.Image(str(event.picture))}, step=event.step)


class Comet(Tracker):
    """An experiment of a project at Comet; its own variables (COMET_START_ONLINE=false) hold. It takes no code, output or gradients by itself."""

    def __init__(self, project: str) -> None:
        self._project = project

    def on_start(self, event: Event) -> None:
        import comet_ml

        config = comet_ml.ExperimentConfig(
            auto_param_logging=False, auto_metric_logging=False, auto_output_logging="", parse_args=False, log_graph=False, log_code=False, log_git_patch=False,
            display_summary_level=0, offline_directory=str(event.run_dir / "comet"),
        )  # fmt: skip
        self._experiment = comet_ml.start(project_name=self._project, experiment_key=self.run, experiment_config=config)
        if self.run is None:
            self._experiment.log_parameters(dict(flattened(asdict(event.recipe))))
        self.run = self._experiment.get_key()

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._experiment.log_metrics(numbers, step=step)

    def on_predictions(self, event: Event) -> None:
        self._experiment.log_image(str(event.picture), name="predictions", step=event.step)

    def on_end(self, event: Event) -> None:
        self._experiment.end()


def _numbers(prefix: str, metrics: JsonMapping) -> dict[str, float]:
    """The numbers among metrics under their full names, without the step itself."""
    return {
        f"{prefix}/{name}": value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
    }


def _plain(recipe: Recipe) -> JsonObject:
    plain: JsonObject = finite(asdict(recipe))
    return plain
