"""Scores of one answer: exact match, accuracy, ANLS, numbers, word and character error rate.

Each takes a prediction and the answers that are accepted, and gives a `Score`: a sum and what it is divided by, so that rows add up.
All but the error rates are shares (1 is best); those are 0 at best and may exceed 1.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

ANLS_THRESHOLD = 0.5  # tau of Biten et al. 2019
ANNOTATORS = 10  # answers of one question of VQA, at which several people have to agree
ARTICLES = frozenset(("a", "an", "the"))
NUMBERS = {
    "none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8",
    "nine": "9", "ten": "10",
}  # fmt: skip

NUMBER = re.compile(r"(?:(?<![\d.])[-+])?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
MARKS = re.compile(f"[{re.escape(string.punctuation.replace('.', ''))}]")


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
    predicted, best = _folded(prediction), 0.0
    for answer in map(_folded, answers):
        if predicted == answer:
            return Score(1.0)
        longest = max(len(predicted), len(answer))
        if abs(len(predicted) - len(answer)) < ANLS_THRESHOLD * longest:  # else the distance is over the threshold, too
            distance = edit_distance(predicted, answer) / longest
            best = max(best, 1.0 - distance if distance < ANLS_THRESHOLD else 0.0)
    return Score(best)


def number(prediction: str, answers: Sequence[str], tolerance: float = 1e-6) -> Score:
    """1 where the prediction's last number is the last number of one of the answers, up to a share of that.

    Commas between digits are left out, and what stands after the number (%, kg) does not count. 0.05 is ChartQA's relaxed accuracy
    (Masry et al. 2022).
    """
    predicted = last_number(prediction)
    wanted = [value for answer in answers if (value := last_number(answer)) is not None]
    return Score(
        float(predicted is not None and any(abs(predicted - value) <= tolerance * abs(value) for value in wanted))
    )


def last_number(text: str) -> float | None:
    """The last finite number in a text; None where it has none."""
    numbers = NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    value = float(numbers[-1].replace(",", "")) if numbers else math.inf
    return value if math.isfinite(value) else None


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

    Hyyrö's bit-parallel form of Myers' algorithm (2003, "A bit-vector algorithm for computing Levenshtein and Damerau edit distances"):
    a column of the table lies in the bits of two integers. Takes max(len(a), len(b)) steps on integers of min(len(a), len(b)) bits.
    """
    shorter, longer = sorted((a, b), key=len)
    if not shorter:
        return len(longer)
    bits: dict[str, int] = {}  # where each item stands in the shorter one
    for index, item in enumerate(shorter):
        bits[item] = bits.get(item, 0) | 1 << index
    every, last = (1 << len(shorter)) - 1, 1 << (len(shorter) - 1)
    up, down, distance = every, 0, len(shorter)  # where the column rises and falls by 1, and its last entry
    for item in longer:
        same = bits.get(item, 0)
        diagonal = ((((same | down) & up) + up) ^ up) | same | down
        right, left = down | ~(diagonal | up) & every, diagonal & up
        distance += bool(right & last) - bool(left & last)
        right, left = right << 1 | 1, left << 1
        up, down = (left | ~(diagonal | right)) & every, right & diagonal & every
    return distance


def _folded(text: str) -> str:
    return " ".join(text.lower().split())


def plain_words(text: str) -> list[str]:
    """Words for error rates: lower case, compatible forms of characters joined (NFKC), no punctuation but apostrophes within words."""
    text = unicodedata.normalize("NFKC", text).lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    return [word for part in text.translate(_WORDS).split() if (word := part.strip("'"))]


class _Words(dict[int, str]):
    """Letters for `str.translate`: a space for punctuation and symbols but apostrophes."""

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        self[code] = " " if unicodedata.category(letter)[0] in "PS" and letter != "'" else letter
        return self[code]


_WORDS = _Words()


def plain_answer(text: str) -> str:
    """A short answer as VQA's evaluation compares it: lower case, no articles, number words as digits, no punctuation.

    Punctuation is taken out next to a space and made a space elsewhere; a comma within digits is taken out, and a point within digits stays.
    Apostrophes are taken out, so that contractions are equal with and without them.
    """
    text = re.sub(r"(?<=\d),(?=\d)", "", text.lower().replace("'", "").replace("\N{RIGHT SINGLE QUOTATION MARK}", ""))
    text = re.sub(r"\.(?!\d)", "", text)
    text = MARKS.sub(" ", text)
    words = [NUMBERS.get(word, word) for word in text.split()]
    return " ".join(word for word in words if word not in ARTICLES)
