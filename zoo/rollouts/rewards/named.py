"""Rewards by name: each a function of an answer, the texts accepted as one, and the row, which gives a number, 1 at best.

    exact_match, accuracy, anls, iou    the score of that name (`zoo.generation.scores`)
    number, number=0.05                 the last number, up to a share of the one wanted
    wer, cer                            1 - error rate, 0 at least
    format                              the answer is <think>...</think><answer>...</answer>, each once
    model                               the score of rl.reward_model (`zoo.rollouts.rewards.model`)
    format=REGEX                        the answer matches the regular expression as a whole; `.` matches line ends too

All but format read what stands in the answer's last <answer> tags, or else after its </think>, if it has either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from zoo.errors import UserError, printable
from zoo.generation.scores.answer_scores import number
from zoo.generation.scores.choose import OWN, Scorer
from zoo.registry import imported
from zoo.types import JsonMapping

type Reward = Callable[..., float]
"""A reward: answer, references, row -> number. A user's takes what the row has in `extra` by name, too."""

ERROR_RATES = ("wer", "cer")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
FORMAT, MODEL = "format", "model"
KEY = "rl.rewards"


def find_reward(name: str) -> Reward:
    """The reward of a name, or the function of a `module:function` or `file.py:function`.

    Raises:
        UserError: no such reward or function, or a tolerance or regular expression that is none.
    """
    plain, equals, argument = name.partition("=")
    if plain == FORMAT:
        return _matches(argument) if equals else _thinks
    if plain == "number" and equals:
        return _scored(_tolerant(argument))
    if name in OWN:
        return _scored(OWN[name], error_rate=name in ERROR_RATES)
    if not is_own(name):
        function = imported(name, KEY)
        if not callable(function):
            raise UserError(
                f"{KEY}={printable(name, 100)}: it is no function; one of (answer, references, row) is wanted"
            )
        reward: Reward = function
        return reward
    there = [*OWN, FORMAT, MODEL]
    near = get_close_matches(plain, there, n=1, cutoff=0.4)
    hint = f"nearest: {near[0]}; " if near else ""
    raise UserError(
        f"{KEY}={printable(name, 100)}: no such reward; {hint}there are {', '.join(there)}, and module:function for one of "
        "your own"
    )


def is_own(name: str) -> bool:
    """Whether a reward is one of zoo's, whose argument may have a colon."""
    return ":" not in name or name.partition("=")[0] in (*OWN, FORMAT)


def is_isolated(name: str) -> bool:
    """Whether a reward is computed in a process of its own: it is a user's function, or a regular expression, which may not end."""
    return not is_own(name) or name.startswith(f"{FORMAT}=")


def is_referenced(name: str) -> bool:
    """Whether a reward compares with references, so that a row without them has no reward."""
    return name.partition("=")[0] in OWN


def final_answer(text: str) -> str:
    """What an answer says in its last <answer> tags, or after its last </think>; all of it where it has neither."""
    opened = text.rfind("<answer>")
    closed = text.find("</answer>", opened)
    if opened >= 0 and closed >= 0:
        return text[opened + len("<answer>") : closed]
    return text.rpartition("</think>")[2]


def _scored(score: Scorer, *, error_rate: bool = False) -> Reward:
    def reward(answer: str, references: Sequence[str], row: JsonMapping) -> float:
        value = score(final_answer(answer), references).value
        return max(0.0, 1.0 - value) if error_rate else value

    return reward


def _tolerant(argument: str) -> Scorer:
    try:
        tolerance = float(argument)
    except ValueError:
        tolerance = -1.0
    if not 0 <= tolerance < 1:
        raise UserError(f"{KEY}=number={printable(argument, 60)}: wanted a share from 0 to 1, as in number=0.05")
    return lambda prediction, answers: number(prediction, answers, tolerance)


def _matches(pattern: str) -> Reward:
    try:
        expression = re.compile(pattern, re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(
            f"{KEY}=format={printable(pattern, 100)}: it is no regular expression of Python's ({error})"
        ) from error
    return lambda answer, references, row: float(expression.fullmatch(answer.strip()) is not None)


def _thinks(answer: str, references: Sequence[str], row: JsonMapping) -> float:
    text = answer.strip()
    places = [text.find(tag) for tag in TAGS]
    once = all(text.count(tag) == 1 for tag in TAGS) and places == sorted(places)
    between = text[places[1] + len(TAGS[1]) : places[2]]
    return float(once and places[0] == 0 and text.endswith(TAGS[3]) and not between.strip())
