"""Rows with images of odd sizes, several to a sample, and videos of the bundled digits, for families that cut tiles."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support.rows import Example, encode

SIZES = {"wide": (150, 40), "tall": (33, 71), "square": (90, 91), "long": (31, 200), "small": (17, 19)}
IMAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # texts by turns, sizes of their images
    "wide": (("<image>Read.", "12"), ("wide",)),
    "tall": (("Look: <image>", "3 4"), ("tall",)),
    "square": (("<image>", "Nothing."), ("square",)),
    "two": (("<image>and <image>Which?", "The first."), ("square", "long")),
    "three": (("<image><image> <image>Count.", "3"), ("small", "wide", "tall")),
    "turns": (("<image>Read.", "7", "And <image>?", "31 0"), ("long", "small")),
    "text-short": (("Hi", "Ho"), ()),
    "text-long": (("Say all the digits, one by one, twice.", "0 1 2 3 4 5 6 7 8 9 " * 2), ()),
}
VIDEOS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {  # texts, number of videos, sizes of images
    "video": (("<video>Watch.", "5"), 1, ()),
    "image+video": (("<image><video>Both.", "6"), 1, ("tall",)),
    "video+video+image": (("<video> <video>, then <image>", "9 8"), 2, ("wide",)),
    "video+image+image": (("<video><image><image>", "0"), 1, ("wide", "small")),
}


def tile_examples(processor: Any) -> dict[str, Example]:
    """The rows of IMAGES, and of VIDEOS where the processor takes them, with images drawn at random."""
    rows = {name: (texts, 0, sizes) for name, (texts, sizes) in IMAGES.items()}
    if "video" in processor.modalities:
        rows |= VIDEOS
    videos = _videos() if rows.keys() > IMAGES.keys() else []
    with TemporaryDirectory() as folder:
        return {
            name: _example(processor, Path(folder), name, texts, videos[:clips], sizes)
            for name, (texts, clips, sizes) in rows.items()
        }


def _example(
    processor: Any, folder: Path, name: str, texts: tuple[str, ...], videos: list[str], sizes: tuple[str, ...]
) -> Example:
    from zoo.data.sources.references import Access
    from zoo.data.sources.rows import make_row

    roles = ("user", "assistant") * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    images = [draw(folder, f"{name}{i}", SIZES[size], len(name) + i) for i, size in enumerate(sizes)]
    row = {"messages": messages, "images": images, "videos": videos}
    return encode(processor, make_row(row, name, Access(folder)), name)


def draw(folder: Path, name: str, size: tuple[int, int], seed: int) -> str:
    """A picture of (width, height) random pixels; gives back its file's name."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / f"{name}.png")
    return f"{name}.png"


def _videos() -> list[str]:
    """The two shortest videos of the digits that are as long, as transformers' model wants those of one call."""
    import zoo.data.digits
    from zoo.data.media.decode import load_video
    from zoo.data.sources.rows import read_rows

    root = Path(zoo.data.digits.__file__).parent
    names = [str(root / name) for row in read_rows("digits:heldout") for name in row.videos]
    by_frames: dict[int, list[str]] = {}
    for name in names:
        by_frames.setdefault(len(load_video(name, 2.0, 768)[0]), []).append(name)
    return by_frames[min(frames for frames, alike in by_frames.items() if len(alike) > 1)][:2]
