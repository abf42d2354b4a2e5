"""Which scores a row has: by its task, by its media, or as asked; scores of users by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

from zoo.errors import UserError, printable
from zoo.generation.scores.answer_scores import Score, accuracy, anls, cer, exact_match, number, wer
from zoo.generation.scores.boxes import iou
from zoo.registry import imported
from zoo.user_code import calling

GROUP = "zoo.scores"  # entry points: name -> module:function
type Scorer = Callable[[str, Sequence[str]], Score]

OWN: dict[str, Scorer] = {
    "exact_match": exact_match, "accuracy": accuracy, "anls": anls, "number": number, "iou": iou, "wer": wer, "cer": cer,
}  # fmt: skip
ALWAYS = "exact_match"
BY_TASK = {
    "document": ("anls",),
    "ocr": ("anls", "cer"),
    "speech": ("wer",),
    "asr": ("wer",),
    "vqa": ("accuracy",),
    "text": (),
}
SOUND, PICTURES = ("wer",), ("accuracy", "anls")


@dataclass(frozen=True)
class Scores:
    """The scores that were asked for."""

    asked: Mapping[str, Scorer]  # by name; empty: each row has those of its task or media

    @classmethod
    def named(cls, names: Iterable[str]) -> Scores:
        """Scores by name: zoo's own, entry points of the group `zoo.scores`, `module:function` or `file.py:function`.

        Raises:
            UserError: no such score.
        """
        return cls({name.rpartition(":")[2]: find_score(name) for name in names})

    def names(self, task: str | None, media: Iterable[str]) -> tuple[str, ...]:
        """The scores of a row, exact match first.

        Args:
            task: the row's task; None, or one that is not known: its media decide.
            media: kinds of media in the row.
        """
        if self.asked:
            return (ALWAYS, *(name for name in self.asked if name != ALWAYS))
        there = set(media)
        by_media = PICTURES if there & {"image", "video"} else SOUND if there else ("accuracy",)
        return (ALWAYS, *BY_TASK.get(task or "", by_media))

    def of_row(
        self, prediction: str, answers: Sequence[str], task: str | None, media: Iterable[str]
    ) -> dict[str, Score]:
        """The scores of a row's prediction, by name; `answers` are all that are accepted, at least one."""
        return {
            name: self.asked.get(name, OWN.get(name, exact_match))(prediction, answers)
            for name in self.names(task, media)
        }


def find_score(name: str) -> Scorer:
    """The score of a name; UserError where there is none."""
    if name in OWN:
        return OWN[name]
    if ":" in name:
        return _users(imported(name, "metrics"), name)
    announced = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in announced:
        with calling(f"metrics={name}"):
            function = announced[name].load()
        return _users(function, name)
    there = [*OWN, *announced]
    near = get_close_matches(name, there, n=1, cutoff=0.4)
    hint = f"nearest: {near[0]}; " if near else ""
    raise UserError(
        f"metrics={printable(name, 100)}: no such score; {hint}there are {', '.join(there)}, and module:function for one of "
        "your own"
    )


def _users(function: Any, name: str) -> Scorer:
    """A user's function `(prediction, answers) -> number`, or (total, weight)."""
    if not callable(function):
        raise UserError(f"metrics={printable(name, 100)}: it is no function; one of (prediction, answers) is wanted")

    def score(prediction: str, answers: Sequence[str]) -> Score:
        try:
            with calling(f"metrics={name}"):
                value = function(prediction, list(answers))
            return Score(*map(float, value)) if isinstance(value, tuple) else Score(float(value))
        except Exception as error:  # of the user's function, whatever it raises
            reason = printable(f"{type(error).__name__}: {error}", 300)
            raise UserError(
                f"metrics={printable(name, 100)}: it failed on prediction {shown(prediction)} ({reason}); a number, or "
                "(total, weight), is wanted"
            ) from error

    return score


def shown(text: str) -> str:
    """A text shortened and quoted for a message."""
    return repr(printable(text, 60))
