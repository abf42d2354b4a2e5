"""Scores of answers against cases counted by hand, and which scores a row has."""

import random
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from zoo.errors import UserError
from zoo.generation.scores import choose
from zoo.generation.scores.answer_scores import (
    accuracy,
    anls,
    cer,
    edit_distance,
    exact_match,
    last_number,
    number,
    plain_answer,
    plain_words,
    wer,
)
from zoo.generation.scores.choose import Scores


def plain_distance(a: str, b: str) -> int:
    """Levenshtein's recursion as it is defined."""

    @cache
    def between(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        return min(between(i - 1, j) + 1, between(i, j - 1) + 1, between(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

    return between(len(a), len(b))


def test_edit_distance_is_levenshteins() -> None:
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == edit_distance("abc", "") == 3
    assert edit_distance(["the", "cat"], ["a", "cat", "sat"]) == 2
    draw = random.Random(0)
    for _ in range(200):
        a, b = ("".join(draw.choices("abc", k=draw.randrange(8))) for _ in "ab")
        assert edit_distance(a, b) == plain_distance(a, b), (a, b)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("12, then 1,234.5 kg.", 1234.5),
        ("x = -7", -7.0),
        ("5-3", 3.0),
        ("\N{MINUS SIGN}2", -2.0),
        ("1.5e3 %", 1500.0),
        (".5", 0.5),
        ("12,34", 34.0),
        ("none", None),
        ("9" * 400, None),
    ],
)
def test_last_number_of_a_text(text: str, wanted: float | None) -> None:
    assert last_number(text) == wanted


def test_numbers_are_compared_up_to_a_share() -> None:
    assert number("so 0.333", ["1/3", "0.3333"], 0.01).value == 1.0
    assert number("0.333", ["0.3333"]).value == 0.0
    assert number("0", ["-0.0"]).value == 1.0 and number("0.1", ["0"], 0.5).value == 0.0
    assert number("no idea", ["none"]).value == 0.0


@pytest.mark.parametrize(
    ("prediction", "answers", "wanted"),
    [
        ("Hello", ["hello"], 1.0),
        ("10.2 kg", ["10.3  KG"], 1 - 1 / 7),
        ("abcd", ["abxy"], 0.0),  # distance 2 of 4: at the threshold
        ("abcde", ["abxye"], 1 - 2 / 5),
        ("Rome", ["Paris", "Roma"], 0.75),
        ("", ["x"], 0.0),
    ],
)
def test_anls_counted_by_hand(prediction: str, answers: list[str], wanted: float) -> None:
    assert anls(prediction, answers).value == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("prediction", "answers", "total", "weight"),
    [
        ("The cat sat.", ["the CAT sat"], 0, 3),
        ("the cat sat on", ["the cat sat"], 1, 3),
        ("", ["two words"], 2, 2),
        ("don't stop", ["don\u2019t, stop!"], 0, 2),
        ("well-known", ["well known"], 0, 2),
        ("a b c", ["x", "a b d"], 1, 3),
        ("noise", ["..."], 1, 0),
    ],
)
def test_word_errors_counted_by_hand(prediction: str, answers: list[str], total: int, weight: int) -> None:
    assert wer(prediction, answers) == (total, weight)


def test_character_errors() -> None:
    assert cer("东京都", ["东京"]) == (1, 2)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("The Two dogs.", "2 dogs"), ("1,000", "1000"), ("2.5", "2.5"), ("Don't", "dont"), ("yes!", "yes"), ("at 3:15", "at 3 15"),
    ],
)  # fmt: skip
def test_answers_are_normalised_as_in_vqa(said: str, wanted: str) -> None:
    assert plain_answer(said) == wanted


def test_accuracy_with_ten_people() -> None:
    def people(red: int) -> list[str]:
        return ["red"] * red + ["blue"] * (10 - red)

    assert accuracy("Red.", people(4)).value == 1.0
    assert accuracy("red", people(3)).value == pytest.approx((7 * 1 + 3 * 2 / 3) / 10)
    assert accuracy("red", people(1)).value == pytest.approx(9 / 30)
    assert accuracy("green", people(5)).value == 0.0
    assert accuracy("a red", ["blue", "red"]).value == 1.0


def test_exact_match_is_strict_but_for_ends() -> None:
    assert exact_match(" 12 ", ["12"]).value == 1.0
    assert exact_match("Red", ["red"]).value == 0.0
    assert plain_words("'Tis") == ["tis"]


def test_rows_have_the_scores_of_task_or_media() -> None:
    scores = Scores.named([])
    assert scores.names(None, {"image"}) == ("exact_match", "accuracy", "anls")
    assert scores.names(None, {"audio"}) == ("exact_match", "wer")
    assert scores.names(None, {"audio", "video"}) == ("exact_match", "accuracy", "anls")
    assert scores.names("document", {"image"}) == ("exact_match", "anls")
    assert scores.names("of my own", set()) == ("exact_match", "accuracy")
    asked = Scores.named(["anls"])
    assert asked.names("speech", {"audio"}) == ("exact_match", "anls")
    assert asked.of_row("a", ["a"], None, ())["anls"].value == 1.0


def test_scores_of_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "def longer(said, answers): return len(said) > len(answers[0])\n"
        "def words(said, answers): return (1, 4)\n"
        "def broken(said, answers): return said.nothing\n"
    )
    monkeypatch.chdir(tmp_path)
    scores = Scores.named(["mine.py:longer", "mine.py:words"]).of_row("abc", ["ab"], None, ())
    assert {name: score.value for name, score in scores.items()} == {"exact_match": 0.0, "longer": 1.0, "words": 0.25}
    with pytest.raises(UserError, match="broken: it failed"):
        Scores.named(["mine.py:broken"]).of_row("abc", ["ab"], None, ())
    point = EntryPoint("announced", "zoo.generation.scores.answer_scores:cer", choose.GROUP)
    monkeypatch.setattr(choose, "entry_points", lambda group: [point])
    assert Scores.named(["announced"]).of_row("ab", ["ac"], None, ())["announced"].value == 0.5
    with pytest.raises(UserError, match="nearest: anls"):
        Scores.named(["anl"])
    with pytest.raises(UserError, match="can't be imported"):
        Scores.named(["mine.py:nothing"])
