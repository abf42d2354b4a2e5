"""Checks of a loss of preferences against the keys that it does not go with."""

from __future__ import annotations

from zoo.config.schema import Recipe
from zoo.errors import ConfigError

REFERENCED = ("dpo", "ipo", "kto")  # losses that compare with a reference model


def check_preference(recipe: Recipe) -> None:
    """ConfigError for a key that means nothing to the loss."""
    train, data = recipe.train, recipe.data
    smoothed = train.loss in ("dpo", "simpo")
    if train.label_smoothing and not smoothed:
        raise ConfigError(
            f"train.label_smoothing={train.label_smoothing:g} with train.loss={train.loss}: dpo and simpo alone have it; leave it out"
        )
    _check_reference(recipe)
    if train.preference and recipe.distill.teacher is not None:
        raise ConfigError(
            f"distill.teacher={recipe.distill.teacher} with train.loss={train.loss}: a teacher says something of single answers; leave one "
            "of the two out"
        )
    if train.center_rewards and not train.scores:
        raise ConfigError(f"train.center_rewards with train.loss={train.loss}: reward alone has it; leave it out")
    for key in ("desirable_weight", "undesirable_weight"):
        if getattr(train, key) != 1 and not train.labelled:
            raise ConfigError(f"train.{key} with train.loss={train.loss}: kto alone has it; leave it out")
    if not train.preference:
        if recipe.lora.keep_dropout:
            raise ConfigError(
                f"lora.keep_dropout=true with train.loss={train.loss}: only losses of preferences leave dropout out; lora.dropout is enough"
            )
        return
    wanted: tuple[tuple[str, object, tuple[object, ...]], ...] = (
        ("data.labels", data.labels, ("assistant", "last")),
        ("data.overlong", data.overlong, ("error", "drop")),
        ("data.blank_answers", data.blank_answers or 0, (0,)),
    )
    for key, value, fitting in wanted:
        if value not in fitting:
            raise ConfigError(
                f"{key}={value} with train.loss={train.loss}: a loss of preferences goes with "
                f"{' or '.join(f'{key}={one}' for one in fitting)}"
            )


def _check_reference(recipe: Recipe) -> None:
    train = recipe.train
    if train.reference == "start":
        return
    if train.loss not in REFERENCED:
        raise ConfigError(
            f"train.reference={train.reference} with train.loss={train.loss}: {', '.join(REFERENCED)} alone have a reference; leave it out"
        )
    if train.reference == "base" and not recipe.lora.rank:
        raise ConfigError(
            "train.reference=base without adapters: it is the model without them; give lora.rank, or train.reference=start"
        )
