"""Random changes to training samples, for sets too small to learn from without them (`data.augment`).

Images and frames: elastic distortion (Simard et al. 2003, "Best Practices for Convolutional Neural Networks"),
shift, contrast and brightness; small images at twice their size now and then. Sound: speed (Ko et al. 2015, "Audio Augmentation for Speech Recognition"),
pauses stretched where it is quiet, silence before and after, gain, noise. What a row says stays the same.
Answers: some tokens that the model reads back are blanked (Bowman et al. 2016, "Generating Sentences from a
Continuous Space", word dropout), so that it can't complete a known answer without looking at the media.

Media are drawn from (seed, variant, row), blanks from (seed, epoch, row), so a run can be repeated and resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from zoo.data.sample import Sample

RATE = 16_000  # Hz, of the sound that is changed
SPEED = 0.15  # share by which speech is made faster or slower
PAUSE = 0.25  # seconds, longest silence put in at one place
SHIFT = 0.2  # of the shorter side of an image: elastic distortion and shift
SMALL = 96  # pixels of the longer side, up to which images are doubled, in half of the draws at full strength
CONTRAST = 0.4  # share by which contrast changes; brightness by half of it


class Augment:
    """Draws for one row.

    Args:
        strength: 0 to 1, factor of every range above.
        key: integers that the draws follow from.
    """

    def __init__(self, strength: float, key: tuple[int, ...]) -> None:
        self.strength = strength
        self.random = np.random.default_rng(key)

    def image(self, image: Image.Image) -> Image.Image:
        """An RGB image of the same size, or twice that."""
        if max(image.size) <= SMALL and self.random.random() < self.strength / 2:
            image = image.resize((2 * image.width, 2 * image.height), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        return Image.fromarray(self.frames(pixels)[0].permute(1, 2, 0).numpy())

    def frames(self, frames: Tensor) -> Tensor:
        """(T, 3, H, W) uint8 frames, all changed alike."""
        height, width = frames.shape[-2:]
        moved = F.grid_sample(
            frames.float(),
            self._grid(height, width).expand(len(frames), height, width, 2),
            padding_mode="border",
            align_corners=False,
        )
        contrast = 1 + self._uniform(CONTRAST)
        brightness = 255 * self._uniform(CONTRAST / 2)
        mean = moved.mean()
        return ((moved - mean) * contrast + mean + brightness).clamp(0, 255).round().to(torch.uint8)

    def _grid(self, height: int, width: int) -> Tensor:
        """Where each pixel of the result is taken from, (1, H, W, 2) in the units of grid_sample."""
        short = min(height, width)
        cells = (max(2, round(2 * height / short) + 1), max(2, round(2 * width / short) + 1))
        reach = SHIFT * self.strength * short
        field = torch.from_numpy(self.random.normal(0, reach / 2, (1, 2, *cells)).astype(np.float32))
        field = F.interpolate(field, (height, width), mode="bicubic", align_corners=True)[0]
        field += torch.tensor([self._uniform(SHIFT) * short, self._uniform(SHIFT) * short])[:, None, None]
        y = torch.arange(height)[:, None] + 0.5 + field[0]
        x = torch.arange(width)[None, :] + 0.5 + field[1]
        return torch.stack((2 * x / width - 1, 2 * y / height - 1), dim=-1)[None]

    def audio(self, wave: np.ndarray) -> np.ndarray:
        """(N,) float32 at 16 kHz -> (N',) float32; N' differs by speed and pauses."""
        speed = 1 + self._uniform(SPEED)
        wave = np.interp(np.arange(0, len(wave) - 1, speed), np.arange(len(wave)), wave)
        wave = self._pauses(wave)
        wave = wave * 10 ** (self.strength * self.random.uniform(-12, 3) / 20)
        loud = np.sqrt(np.mean(wave**2)) + 1e-6
        noise = loud * 10 ** (-self.random.uniform(15, 45) / 20) * self.strength
        return (wave + self.random.normal(0, noise, len(wave))).clip(-1, 1).astype(np.float32)

    def _pauses(self, wave: np.ndarray) -> np.ndarray:
        """Silence before, after, and at up to three quiet places within."""
        block = RATE // 100
        blocks = len(wave) // block
        level = np.abs(wave[: blocks * block]).reshape(blocks, block).mean(1)
        quiet = np.flatnonzero(level < 0.15 * level.max()) * block
        count = min(int(self.random.integers(0, 4)), len(quiet))
        inner = self.random.choice(quiet, count, replace=False).tolist() if count else []
        pieces: list[np.ndarray] = []
        last = 0
        for end in sorted({0, len(wave), *inner}):
            silence = np.zeros(int(self.random.uniform(0, PAUSE) * self.strength * RATE))
            pieces += [wave[last:end], silence]
            last = end
        return np.concatenate(pieces)

    def blank(self, input_ids: Tensor, labels: Tensor, blank_id: int, share: float) -> Tensor:
        """`input_ids` (L,) with a share of the labelled tokens, the last of each answer aside, as `blank_id`.

        Labels stay: what is predicted is the same, what it is predicted from is less.
        """
        answered = labels >= 0
        follows = torch.roll(answered, -1)
        follows[-1:] = False  # an answer's last token is its end of turn, which template tokens follow
        drop = torch.from_numpy(self.random.random(len(input_ids)) < share)
        return input_ids.masked_fill(answered & follows & drop, blank_id)

    def media(self, media: Mapping[str, list]) -> dict[str, list]:
        """Images, videos (frames) and audio (waves) of a row, each changed at random."""
        change: dict[str, Callable] = {"images": self.image, "videos": self.frames, "audio": self.audio}
        return {kind: [change[kind](item) for item in items] for kind, items in media.items()}

    def _uniform(self, reach: float) -> float:
        return float(self.random.uniform(-reach, reach)) * self.strength


@dataclass(frozen=True)
class AugmentPolicy:
    """Which random changes the samples of a run get.

    Attributes:
        strength: of changes to the media, 0 to 1 (data.augment).
        variants: in how many ways the media of a row are changed, which its repeats take in turn (data.augment_variants).
        blank: share of answer tokens that are blanked in the input (data.blank_answers).
        seed: what the changes follow from, beside row and repeat.
    """

    strength: float = 0.0
    variants: int = 1
    blank: float = 0.0
    seed: int = 0

    def media(self, variant: int, row: int) -> Augment | None:
        """The changes to the media of a row in one of its variants; None where there are none."""
        return Augment(self.strength, (self.seed, variant, row)) if self.strength else None

    def blanked(self, sample: Sample, repeat: int, row: int, blank_id: int) -> Sample:
        """The sample with some answer tokens as `blank_id`, drawn anew for each repeat of its row."""
        if not self.blank:
            return sample
        draw = Augment(0.0, (self.seed, repeat, row))
        ids = draw.blank(sample.input_ids, sample.labels, blank_id, self.blank)
        return replace(sample, input_ids=ids)
