"""Checks of the optimisation's keys: losses of preferences, optimizer, schedule, and names of held-out metrics. Imports no torch."""

from __future__ import annotations

from zoo.config.architecture import text_config
from zoo.config.schema import Recipe, TrainConfig
from zoo.config.schema.conditions import REFERENCED
from zoo.errors import ConfigError, UserError, printable
from zoo.registry import families
from zoo.types import JsonMapping, JsonObject


def check_preference(recipe: Recipe) -> None:
    """ConfigError for a key that means nothing to the loss."""
    train, data = recipe.train, recipe.data
    smoothed = train.loss in ("dpo", "simpo")
    if train.label_smoothing and not smoothed:
        raise ConfigError(
            f"train.label_smoothing={train.label_smoothing:g} with train.loss={train.loss}: dpo and simpo alone have it; leave it out"
        )
    _check_reference(recipe)
    if (train.preference or train.embeds) and recipe.distill.teacher is not None:
        raise ConfigError(
            f"distill.teacher={recipe.distill.teacher} with train.loss={train.loss}: a teacher says something of single answers; leave one "
            "of the two out"
        )
    if train.center_rewards and not train.scores:
        raise ConfigError(f"train.center_rewards with train.loss={train.loss}: reward alone has it; leave it out")
    for key in ("desirable_weight", "undesirable_weight"):
        if getattr(train, key) != 1 and not train.labelled:
            raise ConfigError(f"train.{key} with train.loss={train.loss}: kto alone has it; leave it out")
    if train.embeds:
        _check_embeddings(recipe)
    elif not train.preference:
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
                f"{key}={value} with train.loss={train.loss}: this loss goes with "
                f"{' or '.join(f'{key}={choice}' for choice in fitting)}"
            )


def _check_embeddings(recipe: Recipe) -> None:
    width = text_config(recipe.model.arch).get("hidden_size") if recipe.model.arch else None
    largest = max(recipe.embed.dimensions, default=0)
    if width is not None and largest > width:
        raise ConfigError(
            f"embed.dimensions={recipe.embed.dimensions}: {largest} is above the model's hidden size {width}; give sizes up to that"
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


def check_speech(recipe: Recipe) -> None:
    """ConfigError for what the talker's loss does not go with."""
    train = recipe.train
    if not train.speech_loss:
        return
    family = families().get(recipe.model.family)
    if family is not None and "talker" not in family.parts:
        raise ConfigError(
            f"train.speech_loss={train.speech_loss:g}: {family.title} has no talker that is trained here; leave it out"
        )
    wanted: tuple[tuple[str, object, object], ...] = (
        ("train.loss", train.loss, "nll"),
        ("distill.teacher", recipe.distill.teacher, None),
        ("packing.mode", recipe.packing.mode, "thd"),
        ("engine.fp8", recipe.engine.fp8, False),
    )
    for key, value, fitting in wanted:
        if value != fitting:
            raise ConfigError(
                f"{key}={value} with train.speech_loss={train.speech_loss:g}: the talker is not built for it; leave it out"
            )


def check_optimizer(recipe: Recipe) -> None:
    """ConfigError for Muon with adapters, whose matrices it is not made for, or with state on the host."""
    if recipe.train.optimizer == "muon" and recipe.lora.rank:
        raise ConfigError(
            f"train.optimizer=muon with lora.rank={recipe.lora.rank}: Muon updates whole weights, not the two factors of an adapter; "
            f"set train.optimizer=adamw, or lora.rank=0 to train the weights"
        )
    fraction = recipe.train.optimizer_offload_fraction
    if recipe.train.optimizer == "muon" and fraction:
        raise ConfigError(
            f"train.optimizer=muon with train.optimizer_offload_fraction={fraction:g}: Muon orthogonalises matrices on the GPU and "
            f"needs their momentum there; set train.optimizer=adamw, or train.optimizer_offload_fraction=0"
        )


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


SMALLER, LARGER = (
    ("loss", "wer", "cer", "perplexity"),
    (
        "exact_match",
        "accuracy",
        "anls",
        "vqa",
        "f1",
        "rewards/accuracies",
        "rewards/margins",
        "reward",
        "recall@1",
        "recall@5",
        "recall@10",
        "ndcg@10",
    ),
)


def parse_metric(text: str, key: str) -> tuple[str, float]:
    """A metric's name, and 1.0 where more of it is better, -1.0 where less is.

    Raises:
        ConfigError: the direction is neither given nor known.
    """
    name, _, direction = text.partition(":")
    signs = {"max": 1.0, "min": -1.0}
    if name and direction in signs:
        return name, signs[direction]
    for sign, known in ((-1.0, SMALLER), (1.0, LARGER)):
        if not direction and any(name == prefix or name.startswith(f"{prefix}_") for prefix in known):
            return name, sign
    raise ConfigError(
        f"{key}={printable(text, 100)}: whether more or less of it is better is not known; known are "
        f"{', '.join((*SMALLER, *LARGER))}, each also by kind of row (loss_image), and any other as NAME:min or NAME:max"
    )


def flat(metrics: JsonMapping) -> JsonObject:
    """An evaluation's numbers by name, those of `by_kind` under `NAME_KIND`."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    for kind, scores in (metrics.get("by_kind") or {}).items():
        numbers |= {f"{name}_{kind}": value for name, value in scores.items()}
    return numbers


def refuse_missing(name: str, metrics: JsonMapping, key: str) -> None:
    """UserError where an evaluation's flat metrics lack one that a recipe names."""
    if name not in metrics:
        raise UserError(f"{key}={name}: the evaluation gives no such metric; it gives {', '.join(sorted(metrics))}")
