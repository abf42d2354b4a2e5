"""Boxes read from answers, and their overlap by the best assignment."""

import itertools
import random

import pytest

from zoo.generation.scores.boxes import best_assignment, boxes_of, iou, overlap


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[1, 2, 3.5, 4]", [(1, 2, 3.5, 4)]),
        ('```json\n[{"bbox_2d": [10, 20, 30, 40], "label": "cat"}, {"bbox_2d": [1,2,3,4]}]```', [(10, 20, 30, 40), (1, 2, 3, 4)]),
        ("[[1,2,3,4],[5,6,7,8]]", [(1, 2, 3, 4), (5, 6, 7, 8)]),
        ("the cat (1,2),(3,4) and (5, 6), (7, 8)", [(1, 2, 3, 4), (5, 6, 7, 8)]),
        ("[1, 2, 3] and [1, 2, 3, 4, 5] and [a, b, c, d]", []),
        ("[1, 2, 3,", []),
        ("", []),
    ],
)  # fmt: skip
def test_boxes_are_found(text: str, wanted: list[tuple[float, ...]]) -> None:
    assert boxes_of(text) == wanted


@pytest.mark.parametrize(
    ("prediction", "answer", "wanted"),
    [
        ("[0, 0, 10, 10]", "[0, 0, 10, 10]", 1.0),
        ("[0, 0, 10, 10]", "[0, 0, 10, 5]", 0.5),
        ("[0, 0, 2, 2]", "[1, 1, 3, 3]", 1 / 7),
        ("[0, 0, 1, 1]", "[2, 2, 3, 3]", 0.0),
        ("[10, 10, 0, 0]", "[0, 0, 10, 10]", 0.0),  # corners the wrong way round
        ("[5, 5, 5, 5]", "[5, 5, 5, 5]", 0.0),  # no area
        ("[0,0,1,1] [5,5,6,6]", "[5,5,6,6] [0,0,1,1]", 1.0),  # in another order
        ("[0,0,1,1] [5,5,6,6]", "[0,0,1,1]", 0.5),  # one too many
        ("[0,0,1,1]", "[0,0,1,1] [5,5,6,6] [8,8,9,9]", 1 / 3),  # two are missing
        ("no cat", "[0,0,1,1]", 0.0),
        ("no cat", "none", 1.0),
        ("[0,0,1,1]", "none", 0.0),
    ],
)
def test_overlap_counted_by_hand(prediction: str, answer: str, wanted: float) -> None:
    assert iou(prediction, [answer]).value == pytest.approx(wanted)
    assert iou(prediction, ["[900,900,901,901] [1,2,1,2]", answer]).value == pytest.approx(wanted)


def test_units_make_no_difference() -> None:
    """Thousandths and pixels of an image of 640 x 480, on both sides."""
    a, b = (100, 200, 500, 700), (150, 180, 480, 900)
    scaled = [tuple(value * (0.64, 0.48)[n % 2] for n, value in enumerate(box)) for box in (a, b)]
    assert overlap(*scaled) == pytest.approx(overlap(a, b))  # type: ignore[arg-type]


def test_assignment_is_the_best_of_all() -> None:
    draw = random.Random(0)
    for _ in range(200):
        rows = draw.randint(1, 5)
        columns = draw.randint(rows, 6)
        costs = [[round(draw.random(), 1) for _ in range(columns)] for _ in range(rows)]
        found = best_assignment(costs)
        assert len({*found}) == rows
        least = min(
            sum(row[column] for row, column in zip(costs, order, strict=True))
            for order in itertools.permutations(range(columns), rows)
        )
        assert sum(row[column] for row, column in zip(costs, found, strict=True)) == pytest.approx(least)
