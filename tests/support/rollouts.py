"""Runs of reinforcement learning on rows of the digits, on ranks of the pool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.preference import MEDIA, digit_items, pair_run

SHORT = (
    "rl.samples=4", "rl.max_new_tokens=6", "train.steps=2", "train.global_batch=4", "train.lr=1e-3", "train.schedule=constant",
    "train.warmup_steps=0", "packing.align=8", "packing.budget=1024", "train.aux_loss=0",
)  # fmt: skip


class TokenRewards:
    """A reward that a model with random weights meets now and then: the share of an answer's tokens with an odd id."""

    def __init__(self, *_: object, **__: object) -> None:
        self.weights = {"odd": 1.0}

    def start(self) -> None: ...

    def score(self, rollouts: Sequence[Any], of_model: Sequence[float] = ()) -> Any:
        import torch

        from zoo.rollouts.rewards.rewards import Scores

        for one in rollouts:  # but for the last token, which no layer read
            assert one.routing is None or bool(
                (one.routing[: one.prompt.sample.length + len(one.token_ids) - 1] >= 0).all()
            )
        shares = [[sum(token % 2 for token in one.token_ids) / len(one.token_ids)] for one in rollouts]
        return Scores(torch.tensor(shares, dtype=torch.float64).reshape(len(shares), 1), {})

    def close(self) -> None: ...


def write_rows(file: Path, count: int, kinds: Sequence[str]) -> tuple[str, ...]:
    """Write rows as JSONL, the first ones with an answer, the others with a list of accepted ones; the overrides that train on them."""
    from zoo.data.digits import ROOT

    rows = []
    for number, item in enumerate(digit_items(count, kinds)):
        row = {"messages": item["messages"], **{key: item[key] for key in MEDIA if key in item}}
        if number % 2:
            row |= {"messages": row["messages"][:-1], "answers": [row["messages"][-1]["content"], "none"]}
        rows.append(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    root = () if tuple(kinds) == ("text",) else (f"data.root={ROOT}",)  # which text alone has no use for
    return (f"data.train=[{file}]", "data.eval=none", *root)


def policy_run(
    rank: int, size: int, recipe: str, overrides: tuple[str, ...], own: bool = False
) -> list[dict[str, Any]]:
    """A run on this rank, by `TokenRewards` or the rewards of its `own`; the lines of its steps and evaluations, of the first rank's log."""
    from zoo.rollouts.rewards.rewards import open_rewards
    from zoo.training import reinforcement

    reinforcement.open_rewards = open_rewards if own else TokenRewards  # type: ignore[assignment]
    return pair_run(rank, size, recipe, ("task=grpo", *overrides), "reward")
