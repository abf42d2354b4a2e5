"""Boxes in an answer against those wanted: their overlap, by the best assignment of one to the other."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from zoo.generation.scores.answer_scores import Score

_NUMBER = r"\s*([-+]?\d{1,9}(?:\.\d{0,9})?)\s*"
_LIST = rf"\[{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}\]"
_CORNERS = rf"\({_NUMBER},{_NUMBER}\)\s*,\s*\({_NUMBER},{_NUMBER}\)"
BOX = re.compile(f"{_LIST}|{_CORNERS}")
type Box = tuple[float, float, float, float]  # x1, y1, x2, y2


def iou(prediction: str, answers: Sequence[str]) -> Score:
    """Mean intersection over union of the boxes in the prediction and in an answer, each matched with one other at most.

    The best assignment counts, divided by the larger number of boxes, so that a missing or spare box counts 0; the best over the
    answers. 1 where neither has a box. Both sides have their coordinates in the same units (pixels, thousandths), which makes no difference.
    """
    predicted = boxes_of(prediction)
    return Score(max((matched_overlap(predicted, boxes_of(answer)) for answer in answers), default=0.0))


def boxes_of(text: str) -> list[Box]:
    """The boxes in a text: lists `[x1, y1, x2, y2]`, within JSON or not, and corners `(x1,y1),(x2,y2)`."""
    numbers = (match.groups() for match in BOX.finditer(text))
    boxes = (groups[:4] if groups[0] is not None else groups[4:] for groups in numbers)
    return [(float(x1), float(y1), float(x2), float(y2)) for x1, y1, x2, y2 in boxes]


def matched_overlap(a: Sequence[Box], b: Sequence[Box]) -> float:
    """Sum of the overlaps of the best assignment of boxes to boxes, divided by the larger number of them; 1 for none and none."""
    fewer, more = sorted((a, b), key=len)
    if not fewer:
        return float(not more)
    overlaps = [[overlap(box, other) for other in more] for box in fewer]
    if len(fewer) == 1:
        return max(overlaps[0]) / len(more)
    columns = best_assignment([[-value for value in row] for row in overlaps])
    return sum(row[column] for row, column in zip(overlaps, columns, strict=True)) / len(more)


def overlap(a: Box, b: Box) -> float:
    """Intersection over union of two boxes; 0 where one has no area or its corners the wrong way round."""
    shared = _area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))
    return shared / (_area(a) + _area(b) - shared) if shared else 0.0


def _area(box: Box) -> float:
    return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)


def best_assignment(costs: Sequence[Sequence[float]]) -> list[int]:
    """The column of each row of costs (N, M), N <= M, each of another column, whose sum is least.

    The Hungarian method with potentials, a shortest path of reduced costs for each row: O(N^2 M), 30 ms of 100 boxes to 100.
    """
    rows, columns = len(costs), len(costs[0])
    row_of = [-1] * (columns + 1)  # that has each column; the last one stands for the row being placed
    row_price, column_price = [0.0] * rows, [0.0] * (columns + 1)
    for new in range(rows):
        row_of[columns], column = new, columns
        nearest, before = [math.inf] * columns, [columns] * columns
        free, reached = [*range(columns)], [columns]
        while row_of[column] >= 0:
            row, price = costs[row_of[column]], row_price[row_of[column]]
            for other in free:
                reduced = row[other] - price - column_price[other]
                if reduced < nearest[other]:
                    nearest[other], before[other] = reduced, column
            column = min(free, key=nearest.__getitem__)
            step = nearest[column]
            for other in reached:
                row_price[row_of[other]] += step
                column_price[other] -= step
            for other in free:
                nearest[other] -= step
            free.remove(column)
            reached.append(column)
        while column != columns:
            row_of[column], column = row_of[before[column]], before[column]
    column_of = {row: column for column, row in enumerate(row_of[:columns]) if row >= 0}
    return [column_of[row] for row in range(rows)]
