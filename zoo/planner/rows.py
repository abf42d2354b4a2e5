"""The row that a plan is made for, where no data say what rows are like."""

from __future__ import annotations

from collections.abc import Mapping

from zoo.config.entries import parse_entry
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.packing.cost import ModelCost
from zoo.planner.activations import Row
from zoo.types import JsonMapping

LABELS, MEDIA, SAMPLE, ITEM = 0.25, 0.5, 2048, 1024


def typical_row(recipe: Recipe, cost: ModelCost, labels: float = LABELS, media: float = MEDIA) -> Row:
    """A full row of a micro-batch: samples of 2048 tokens, in equal parts of each kind of media.

    Args:
        labels: share of the tokens that carry a loss.
        media: share of them that are of media, in items of at most 1024 tokens (a picture of a million pixels), or of
            as many as data.max_pixels gives.

    Raises:
        UserError: a share that is not from 0 to 1.
    """
    for name, share in (("labels", labels), ("media", media)):
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise UserError(f"{name}={share!r}: wanted a share between 0 and 1")
    total = recipe.packing.budget * (recipe.train.micro_batch if recipe.packing.mode == "none" else 1)
    return Row(
        lengths=_pieces(total, min(SAMPLE, recipe.packing.budget)),
        labels=round(total * labels),
        media={
            name: tuple(
                piece * tower.rows_per_token for piece in _pieces(int(total * media) // len(cost.towers), _item(recipe))
            )
            for name, tower in cost.towers.items()
        },
    )


def _item(recipe: Recipe) -> int:
    """Tokens of an image: of the largest that data.max_pixels, or an entry's own, allows."""
    entries = [parse_entry(spec, "data.train") for spec in recipe.data.train]
    own = [entry.max_pixels or recipe.data.max_pixels for entry in entries]
    inner = recipe.model.arch.get("thinker_config")
    arch = inner if isinstance(inner, Mapping) else recipe.model.arch
    vision: JsonMapping = arch.get("vision_config") or {}
    if not vision.get("patch_size") or None in own or not own:
        return ITEM
    patch = vision["patch_size"]
    height, width = patch if isinstance(patch, list | tuple) else (patch, patch)
    merge = vision.get("spatial_merge_size") or 1 / (arch.get("downsample_ratio") or 1)
    return max(int(max(most or 0 for most in own) // (height * width * merge**2)), 1)


def _pieces(total: int, size: int) -> tuple[int, ...]:
    return tuple([size] * (total // size) + ([total % size] if total % size else []))
