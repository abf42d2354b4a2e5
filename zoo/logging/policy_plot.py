"""Panels of a run of reinforcement learning: rewards, answers, divergences and times by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zoo.types import JsonObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEYS = (
    "step", "loss", "skipped", "reward", "answer_tokens", "entropy", "kl", "logprob_difference/mean", "logprob_difference/max",
    "rollout_seconds", "rewards_seconds", "logprobs_seconds", "sync_seconds", "update_seconds",
)  # fmt: skip
LEAST = 0.001  # seconds that are drawn
PARTS = ("rollout", "rewards", "logprobs", "sync", "update")


def draw_panels(axes: Sequence[Axes], steps: Sequence[JsonObject], evals: Sequence[JsonObject]) -> None:
    """Fill five panels with the records of steps and evaluations."""
    x = [record["step"] for record in steps]
    for axis, title, names in (
        (axes[0], "reward", ("reward",)),
        (axes[1], "tokens of an answer", ("answer_tokens",)),
        (axes[2], "nats", ("entropy", "kl")),
        (axes[3], "|rollout's - trainer's log-probability|", ("logprob_difference/mean", "logprob_difference/max")),
    ):
        for name in names:
            if any(name in record for record in steps):
                values = [_value(record.get(name)) for record in steps]
                axis.plot(x, values, linewidth=1.2, label=name.rpartition("/")[2])
        axis.set(xlabel="optimizer step", title=title)
        axis.grid(alpha=0.3)
    if evals:
        axes[0].plot([e["step"] for e in evals], [_value(e.get("reward")) for e in evals], "o-", label="held out")
    axes[3].set_yscale("log")
    rollouts: list[dict[str, float]] = []
    for record in steps:
        if "rollout_seconds" in record or not rollouts:
            rollouts.append(dict.fromkeys(PARTS, 0.0))
        for part in PARTS:
            rollouts[-1][part] += record.get(f"{part}_seconds") or 0.0
    present = [part for part in PARTS if any(rollout[part] >= LEAST for rollout in rollouts)]
    heights = [[rollout[part] for rollout in rollouts] for part in present]
    axes[4].stackplot(range(1, len(rollouts) + 1), heights, labels=present)
    axes[4].set(xlabel="rollout", title="seconds of a rollout and its updates")
    for axis in axes[:5]:
        axis.legend(fontsize=8)


def _value(value: float | None) -> float:
    return math.nan if value is None else value
