"""The row that a plan is made for, where no data say what rows are like."""

from __future__ import annotations

from zoo.config.schema import Recipe
from zoo.packing.cost import ModelCost
from zoo.planner.activations import Row

LABELS, MEDIA, SAMPLE, ITEM = 0.25, 0.5, 2048, 1024


def typical_row(recipe: Recipe, cost: ModelCost, labels: float = LABELS, media: float = MEDIA) -> Row:
    """A full row of a micro-batch: samples of 2048 tokens, in equal parts of each kind of media.

    Args:
        labels: share of the tokens that carry a loss.
        media: share of them that are of media, in items of at most 1024 tokens (a picture of a million pixels).
    """
    total = recipe.packing.budget * (recipe.train.micro_batch if recipe.packing.mode == "none" else 1)
    return Row(
        lengths=_pieces(total, min(SAMPLE, recipe.packing.budget)),
        labels=round(total * labels),
        media={
            name: tuple(
                piece * tower.rows_per_token
                for piece in _pieces(int(total * media) // len(cost.towers), ITEM)
            )
            for name, tower in cost.towers.items()
        },
    )


def _pieces(total: int, size: int) -> tuple[int, ...]:
    return tuple([size] * (total // size) + ([total % size] if total % size else []))
