"""What a vision tower reads of its grids, under the names of the installed transformers and of older ones."""

import pytest
import torch
from transformers import vision_utils

from zoo.steps.vision import _between_positions

OLDER, NEWER = "get_vision_bilinear_indices_and_weights", "get_vision_interpolation_indices_and_weights"


@pytest.mark.skipif(
    not (hasattr(vision_utils, OLDER) and hasattr(vision_utils, NEWER)),
    reason="this transformers has one of the functions only",
)
def test_older_names_hold_the_same_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before transformers 5.15 the corners lie on the first axis, not on the last, and maybe in another order."""
    grid = torch.tensor([[1, 4, 6], [2, 4, 4]])
    newer = _between_positions(grid, 8, 2)
    found = getattr(vision_utils, OLDER)(grid, 8, 2)
    monkeypatch.setattr(vision_utils, OLDER, lambda *_: found)
    monkeypatch.delattr(vision_utils, NEWER)
    older = _between_positions(grid, 8, 2)
    table = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    indices, weights = newer["vision.interp_indices"], newer["vision.interp_weights"]
    wanted = (table[indices] * weights[..., None]).sum(1)
    indices, weights = older["vision.bilinear_indices"], older["vision.bilinear_weights"]
    torch.testing.assert_close((table[indices] * weights[..., None]).sum(0), wanted)
