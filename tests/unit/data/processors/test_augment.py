"""Augmentation: the same draw for the same key, another for another, and shapes that the processor takes."""

import numpy as np
import pytest
import torch
from PIL import Image

from zoo.data.processors.augment import RATE, Augment

KEY = (1, 2, 3)


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 96, 3), dtype=np.uint8))


def word() -> np.ndarray:
    """Half a second of tone between two tenths of silence."""
    tone = np.sin(np.arange(RATE // 2) * 0.2).astype(np.float32)
    silence = np.zeros(RATE // 10, np.float32)
    return np.concatenate([silence, tone, silence])


def test_image_keeps_its_size_and_follows_the_key() -> None:
    first, again, other = (Augment(1.0, key).image(picture()) for key in (KEY, KEY, (1, 2, 4)))
    assert first.size == picture().size and first.mode == "RGB"
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_small_images_are_doubled_now_and_then() -> None:
    sizes = [Augment(1.0, (0, 0, draw)).image(Image.new("RGB", (96, 32))).size for draw in range(40)]
    assert set(sizes) == {(96, 32), (192, 64)} and 10 < sizes.count((192, 64)) < 30
    assert {Augment(1.0, (0, 0, draw)).image(Image.new("RGB", (97, 32))).size for draw in range(9)} == {(97, 32)}


def test_frames_are_moved_alike() -> None:
    frames = torch.randint(0, 255, (1, 3, 32, 64), dtype=torch.uint8).repeat(4, 1, 1, 1)
    moved = Augment(1.0, KEY).frames(frames)
    assert moved.shape == frames.shape and moved.dtype == torch.uint8
    assert (moved == moved[:1]).all()
    assert (moved != frames).any()


def test_sound_changes_length_within_bounds() -> None:
    lengths = {len(Augment(1.0, (0, 0, i)).audio(word())) for i in range(30)}
    assert len(lengths) > 20
    assert min(lengths) > 0.8 * len(word())
    assert max(lengths) < 1.2 * len(word()) + 5 * 0.25 * RATE + 1
    made = Augment(1.0, KEY).audio(word())
    assert made.dtype == np.float32 and np.abs(made).max() <= 1
    assert np.array_equal(made, Augment(1.0, KEY).audio(word()))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_blanked_answers_keep_labels_and_the_end_of_turn(share: float) -> None:
    """Tokens 5.. are an answer of 40 tokens whose last is the end of turn; then the template continues."""
    ids = torch.arange(100, 150)
    labels = torch.full_like(ids, -100)
    labels[5:45] = ids[5:45]
    blanked = Augment(1.0, KEY).blank(ids, labels, 7, share)
    changed = (blanked == 7).nonzero().flatten().tolist()
    assert all(5 <= at < 44 for at in changed)
    torch.testing.assert_close(blanked[blanked != 7], ids[blanked != 7], rtol=0, atol=0)
    assert len(changed) == {0.0: 0, 1.0: 39}.get(share, len(changed))
    assert share != 0.5 or 8 < len(changed) < 32
