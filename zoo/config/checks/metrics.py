"""Names of held-out metrics in a recipe, and whether more or less of them is better. Imports no torch.

`train.keep_best` and `train.early_stop` take a metric, or `NAME:min` and `NAME:max`: `exact_match`, `loss_image`, `my_score:max`. Each is one
of the flat metrics of an evaluation, which have those of each kind of row under `NAME_KIND`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.errors import ConfigError, UserError, printable

SMALLER, LARGER = (
    ("loss", "wer", "cer", "perplexity"),
    ("exact_match", "accuracy", "anls", "vqa", "f1", "rewards/accuracies", "rewards/margins"),
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
        if not direction and any(name == one or name.startswith(f"{one}_") for one in known):
            return name, sign
    raise ConfigError(
        f"{key}={printable(text, 100)}: whether more or less of it is better is not known; known are "
        f"{', '.join((*SMALLER, *LARGER))}, each also by kind of row (loss_image), and any other as NAME:min or NAME:max"
    )


def flat(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation's numbers by name, those of `by_kind` under `NAME_KIND`."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    for kind, found in (metrics.get("by_kind") or {}).items():
        numbers |= {f"{name}_{kind}": value for name, value in found.items()}
    return numbers


def refuse_missing(name: str, metrics: Mapping[str, Any], key: str) -> None:
    """UserError where an evaluation's flat metrics lack one that a recipe names."""
    if name not in metrics:
        raise UserError(f"{key}={name}: the evaluation gives no such metric; it gives {', '.join(sorted(metrics))}")
