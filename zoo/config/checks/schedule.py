"""Checks of the learning rate's schedule against the number of updates."""

from __future__ import annotations

from zoo.config.schema import TrainConfig
from zoo.errors import ConfigError


def check_schedule(train: TrainConfig, total_steps: int | None) -> None:
    """ConfigError for a decay that the schedule does not have, or that does not fit behind the warm-up.

    Args:
        total_steps: updates of the run; None where they follow from epochs and are not known yet.
    """
    decay, warm_up = train.decay_steps, train.warmup_steps
    if decay is None:
        return
    if train.schedule != "wsd":
        raise ConfigError(
            f"train.decay_steps={decay} with train.schedule={train.schedule}: wsd alone has a decay of its own length; "
            f"set train.schedule=wsd, or leave train.decay_steps out"
        )
    if total_steps is not None and warm_up + decay > total_steps:
        raise ConfigError(
            f"train.warmup_steps={warm_up} and train.decay_steps={decay} are more than all steps of the run ({total_steps}); "
            f"lower one of them, or train longer (train.steps, train.epochs)"
        )
