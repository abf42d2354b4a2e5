"""`Rewards`: the rewards of a run, and what they give to the answers of a rollout."""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.config.devices import share_of_cores
from zoo.config.schema import Recipe
from zoo.data.sources.rows import Row
from zoo.errors import UserError, printable
from zoo.generation.scores.choose import shown
from zoo.rollouts.engine import Rollout
from zoo.rollouts.rewards.named import KEY, MODEL, find_reward, is_isolated, is_own, is_referenced
from zoo.rollouts.rewards.pool import RewardProcesses
from zoo.rollouts.rewards.process import Call, called
from zoo.types import JsonObject

MOST_PROCESSES = 8  # by default, a rank
TICK_EVERY = 256  # answers between two signs of life


class Scores(NamedTuple):
    """Rewards of B answers: (B, R) float64 `values` in the order of the rewards, on the CPU, and `failures`, how many are 0 as their
    function has failed, by name."""

    values: Tensor
    failures: Mapping[str, int]


class Rewards:
    """The rewards of a run, for one rank of a replica, which shares them with the others.

    A user's function is `(answer: str, references: Sequence[str], row: Mapping) -> float`: `references` are the texts that the row
    accepts as its answer, `row` is what `row_as_dict` makes of it. What the row has in `extra` comes by name.

    Args:
        weights: by name, as `zoo.rollouts.rewards.named` has them, or by `module:function` or `file.py:function`.
        seconds: longest time of a user's function for an answer.
        processes: that call users' functions, at most.
        zero_failures: where a function fails, takes too long or returns no finite number, its reward is 0; else that is an error.
        tick: called at least once a second while rewards are computed.

    Attributes:
        weights: of each reward, by name.

    Raises:
        UserError: no such reward.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        *,
        seconds: float = 30.0,
        processes: int = 1,
        zero_failures: bool = False,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.weights, self.zero_failures, self.tick = dict(weights), zero_failures, tick
        self._turn = threading.Lock()  # a thread scores a rollout while the main one may score held-out answers
        isolated = [name for name in weights if is_isolated(name)]
        own = {
            name: find_reward(name) for name in weights if is_own(name) and name != MODEL
        }  # a process looks for the others
        self._own = {name: reward for name, reward in own.items() if name not in isolated}
        self._referenced = next(filter(is_referenced, weights), None)
        self._processes = RewardProcesses(isolated, processes, seconds, tick)

    def start(self) -> None:
        """Start a process of users' functions, so that one that can't be imported is told before the first rollout.

        Raises:
            UserError: it can't.
        """
        self._processes.start()

    def score(self, rollouts: Sequence[Rollout], of_model: Sequence[float] = ()) -> Scores:
        """The rewards of some answers, in any thread.

        Args:
            rollouts: the answers.
            of_model: a reward model's score of each, where `weights` have `model`.

        Raises:
            UserError: a row has no reference that a reward compares with, or, without `zero_failures`, a function has failed.
        """
        with self._turn:
            return self._score(rollouts, of_model)

    def _score(self, rollouts: Sequence[Rollout], of_model: Sequence[float]) -> Scores:
        failures: Counter[str] = Counter()
        row_of: dict[int, int] = {}  # number of a prompt -> index of its row
        rows: list[JsonObject] = []
        calls = []
        for rollout in rollouts:
            prompt = rollout.prompt
            if prompt.number not in row_of:
                row_of[prompt.number] = len(rows)
                rows.append(self._checked(prompt.row))
            index = row_of[prompt.number]
            calls.append(Call(0, rollout.text, tuple(rows[index]["answers"]), index))
        values: dict[str, list[float]] = {MODEL: [*of_model]}
        for name, reward in self._own.items():
            values[name] = []
            for number, call in enumerate(calls):
                value, failure = called(reward, name, call, rows[call.row])
                values[name].append(value)
                if failure:
                    failures[name] += 1
                    self._refuse(name, call, rows[call.row], failure)
                if number % TICK_EVERY == 0:
                    self.tick()
        isolated = self._processes.names
        if isolated and calls:
            every = [call._replace(reward=reward) for reward in range(len(isolated)) for call in calls]

            def fail(number: int, reason: str) -> None:
                call = every[number]
                failures[isolated[call.reward]] += 1
                self._refuse(isolated[call.reward], call, rows[call.row], reason)

            flat = self._processes.call([pickle.dumps(row) for row in rows], every, fail)
            values |= {name: flat[at * len(calls) : (at + 1) * len(calls)] for at, name in enumerate(isolated)}
        columns = [values[name] if calls else [] for name in self.weights]
        return Scores(torch.tensor(columns, dtype=torch.float64).T.nan_to_num(nan=0.0), failures)

    def close(self) -> None:
        """End all processes."""
        self._processes.close()

    def _checked(self, row: Row) -> JsonObject:
        if self._referenced and not row.answers:
            raise UserError(
                f"{KEY}={printable(self._referenced, 100)}: {row.source or 'a row'} has no answer to compare with; end its messages with "
                "the assistant's, or give it answers"
            )
        return row_as_dict(row)

    def _refuse(self, name: str, call: Call, row: JsonObject, reason: str) -> None:
        """UserError for a reward that has failed, unless it counts 0."""
        if not self.zero_failures:
            where = row["source"] or "a row"
            raise UserError(
                f"{KEY}={printable(name, 100)}: {reason}, for the answer {shown(call.answer)} to {where}; mend it, or set "
                "rl.on_reward_error=zero"
            )


def open_rewards(recipe: Recipe, tick: Callable[[], None] = lambda: None) -> Rewards:
    """The rewards of a recipe; UserError where one is not there."""
    rl = recipe.rl
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    processes = rl.reward_processes or min(MOST_PROCESSES, share_of_cores(ranks))
    zero = rl.on_reward_error == "zero"
    return Rewards(rl.rewards, seconds=rl.reward_seconds, processes=processes, zero_failures=zero, tick=tick)


def row_as_dict(row: Row) -> JsonObject:
    """What a user's function gets of a row, in plain values: `messages` before the answer, `answers`, media by name, and labels."""
    media = {kind: [str(medium) for medium in getattr(row, kind)] for kind in ("images", "videos", "audios")}
    return {
        "messages": [message._asdict() for message in row.messages],
        "answers": [*row.answers],
        **{kind: names for kind, names in media.items() if names},
        "kind": row.kind,
        "task": row.task,
        "source": row.source,
        "extra": json.loads(row.extra) if row.extra else {},
    }
