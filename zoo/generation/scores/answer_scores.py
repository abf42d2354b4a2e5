"""Scores of one answer: exact match, accuracy, ANLS, word and character error rate.

Each takes a prediction and the answers that are accepted, and gives a `Score`: a sum and what it is divided by, so that rows add up.
Exact match, accuracy and ANLS are shares (1 is best); error rates are 0 at best and may exceed 1.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ANLS_THRESHOLD = 0.5  # tau of Biten et al. 2019
ANNOTATORS = 10  # answers of one question of VQA, at which several people have to agree
ARTICLES = frozenset(("a", "an", "the"))
NUMBERS = {
    "none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8",
    "nine": "9", "ten": "10",
}  # fmt: skip


class Score(NamedTuple):
    """A row's part of a score: over rows it is sum of `total` / sum of `weight`."""

    total: float
    weight: float = 1.0

    @property
    def value(self) -> float:
        """The score of this row alone; an error where nothing was wanted counts in full."""
        return self.total / (self.weight or 1.0)


def exact_match(prediction: str, answers: Sequence[str]) -> Score:
    """1 where the prediction is one of the answers, spaces at both ends aside."""
    return Score(float(prediction.strip() in {answer.strip() for answer in answers}))


def accuracy(prediction: str, answers: Sequence[str]) -> Score:
    """Accuracy of visual question answering, both sides normalised (`plain_answer`).

    With ten answers or more, each of another person, min(1, others that said so / 3), the mean over all but one of them at a
    time (Antol et al. 2015, VQA; the set's own evaluation code). With fewer, 1 where any answer is the prediction.
    """
    predicted = plain_answer(prediction)
    same = [plain_answer(answer) == predicted for answer in answers]
    if len(answers) < ANNOTATORS:
        return Score(float(any(same)))
    shares = [min(1.0, (sum(same) - itself) / 3) for itself in same]
    return Score(sum(shares) / len(shares))


def anls(prediction: str, answers: Sequence[str]) -> Score:
    """Average normalised Levenshtein similarity of document question answering, the best over the answers.

    1 - distance / length of the longer text, and 0 where the distance is half of it or more (Biten et al. 2019, "Scene Text Visual
    Question Answering", equation 1, with tau = 0.5). Case and runs of spaces do not count, as in the benchmarks' own code.
    """
    predicted = _folded(prediction)
    distances = []
    for answer in map(_folded, answers):
        longest = max(len(predicted), len(answer))
        distances.append(edit_distance(predicted, answer) / longest if longest else 0.0)
    nearest = min(distances)
    return Score(1.0 - nearest if nearest < ANLS_THRESHOLD else 0.0)


def wer(prediction: str, answers: Sequence[str]) -> Score:
    """Word error rate: substitutions, deletions and insertions over the words wanted, both sides as `plain_words`.

    Sums over rows, as speech recognition reports it. Where there are several answers, the one with the fewest errors a word counts.
    """
    predicted = plain_words(prediction)
    return _errors(predicted, [plain_words(answer) for answer in answers])


def cer(prediction: str, answers: Sequence[str]) -> Score:
    """Character error rate: `wer` of characters, for scripts without spaces between words."""
    predicted = " ".join(plain_words(prediction))
    return _errors(predicted, [" ".join(plain_words(answer)) for answer in answers])


def _errors(predicted: Sequence[str], wanted: Sequence[Sequence[str]]) -> Score:
    scores = [Score(float(edit_distance(predicted, words)), float(len(words))) for words in wanted]
    return min(scores, key=lambda score: score.value)


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Levenshtein distance of two texts, or of two lists of words: substitutions, deletions and insertions, each 1.

    Takes len(a) passes over len(b) numbers.
    """
    known: dict[str, int] = {}
    left, right = (np.array([known.setdefault(item, len(known)) for item in text], np.int64) for text in (a, b))
    places = np.arange(len(right) + 1)
    row = places.copy()
    for count, item in enumerate(left, start=1):
        best = np.minimum(row[1:] + 1, row[:-1] + (right != item))
        above = np.concatenate(([count], best))
        row = np.minimum.accumulate(above - places) + places  # insertions
    return int(row[-1])


def _folded(text: str) -> str:
    return " ".join(text.lower().split())


def plain_words(text: str) -> list[str]:
    """Words for error rates: lower case, compatible forms of characters joined (NFKC), no punctuation but apostrophes within words."""
    text = unicodedata.normalize("NFKC", text).lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    kept = "".join(" " if unicodedata.category(letter)[0] in "PS" and letter != "'" else letter for letter in text)
    return [word for part in kept.split() if (word := part.strip("'"))]


def plain_answer(text: str) -> str:
    """A short answer as VQA's evaluation compares it: lower case, no articles, number words as digits, no punctuation.

    Punctuation is taken out next to a space and made a space elsewhere; a comma within digits is taken out, and a point within digits stays.
    Apostrophes are taken out, so that contractions are equal with and without them.
    """
    text = re.sub(r"(?<=\d),(?=\d)", "", text.lower().replace("'", "").replace("\N{RIGHT SINGLE QUOTATION MARK}", ""))
    text = re.sub(r"\.(?!\d)", "", text)
    marks = re.escape(string.punctuation.replace(".", ""))
    text = re.sub(rf"[{marks}]", " ", text)
    words = [NUMBERS.get(word, word) for word in text.split()]
    return " ".join(word for word in words if word not in ARTICLES)
