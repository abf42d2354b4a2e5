"""Real rows of the bundled digits, mixtures of their media, and what transformers' processor makes of them.

The rows that a family takes: `make_examples` for what sees and hears, `vision_examples`, `sound_examples` and
`text_examples` for what does not; `tile_examples`, with images of odd sizes, for what cuts them into tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


@dataclass(frozen=True)
class Example:
    """One row: zoo's sample of it, and the arguments that transformers' model is called with."""

    name: str
    sample: Any  # zoo.data.sample.Sample
    features: dict[str, Any]

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return self.sample.length


def dialogue(*said: str, system: str = "", **media: Any) -> dict[str, Any]:
    """A row of turns of user and assistant."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    return {"messages": [{"role": "system", "content": system}] * bool(system) + turns, **media}


def mixtures(image: list[str], video: list[str], audio: list[str], spoken: list[str]) -> dict[str, dict]:
    """Rows with several media each, for families that see and hear."""
    return {
        "image+video+audio": dialogue(
            "<image>Read it. <video>Watch.<audio>Listen.", "1 23", images=image[:1], videos=video[:1], audios=audio[:1]
        ),
        "audio+video+image+image": dialogue(
            "First <audio><video>, then <image> and<image>.",
            "9",
            audios=audio[:1],
            videos=video[1:2],
            images=image[1:3],
        ),
        "spoken+image+spoken+audio": dialogue(
            "<video><image> and <video>then <audio>",
            "5 67",
            videos=spoken[:2],
            images=image[:1],
            audios=audio[:1],
            use_audio_in_video=True,
        ),
        "turns": dialogue("<image>Read.", "7", "And <image>?", "31 0", system="Be brief.", images=image[:2]),
    }


def seen_mixtures(image: list[str], video: list[str], audio: list[str], spoken: list[str]) -> dict[str, dict]:
    """Rows with several media each, for families without ears."""
    return {
        "image+video": dialogue("<image>Read it. <video>Watch.", "1 23", images=image[:1], videos=video[:1]),
        "video+video+image": dialogue(
            "First <video><video>, then <image>", "9 8", images=image[1:2], videos=video[1:3]
        ),
        "turns": dialogue("<image>Read.", "7", "And <image>?", "31 0", images=image[:2]),
    }


def heard_mixtures(image: list[str], video: list[str], audio: list[str], spoken: list[str]) -> dict[str, dict]:
    """Rows of other forms with a clip each, for families that hear and don't see."""
    asr = "language English<asr_text>One, two."
    return {
        "context": dialogue("<audio>Write them down.", "1 23", system="Digits from 0 to 9.", audios=audio[:1]),
        "turns": dialogue("Listen: <audio>", "7", "And the second?", "31 0", audios=audio[1:2]),
        "asr": dialogue("<audio>", asr, audios=audio[2:3]),
    }


def conversations(*_: list[str]) -> dict[str, dict]:
    """Rows of several turns, with a system turn, and one longer than any of the bundled ones."""
    return {
        "turns": dialogue("Say 31 again.", "31", "And 7?", "7", "Copy 902 4.", "902 4"),
        "system": dialogue("Count.", "1, 2, 3", system="Be brief."),
        "long": dialogue("Say " + " ".join(map(str, range(60))), " ".join(map(str, range(59, 0, -1)))),
    }


def make_examples(processor: Any) -> dict[str, Example]:
    """Rows of every kind, and `mixtures`."""

    def usable(row: Any) -> bool:
        """Where one clip of several is under a second, transformers lets its neighbours change it: see test_qwen3_omni_audio.py."""
        from zoo.data.media.decode import load_audio

        if row.kind != "audio":
            return True
        return len(load_audio(row.path(row.audios[0]))) > 1.05 * processor.hf.feature_extractor.sampling_rate

    kinds = ("image", "multi_image", "video", "audio", "audio_in_video", "text")
    return _digits(processor, kinds, mixtures, usable)


def vision_examples(processor: Any) -> dict[str, Example]:
    """Rows with images, videos and text, and `seen_mixtures`."""
    return _digits(processor, ("image", "multi_image", "video", "text"), seen_mixtures)


def sound_examples(processor: Any) -> dict[str, Example]:
    """Rows with speech and text, and `heard_mixtures`; a clip lasts under one second, and one over two."""
    return _digits(processor, ("audio", "text"), heard_mixtures)


def text_examples(processor: Any) -> dict[str, Example]:
    """Rows of text, and `conversations`."""
    return _digits(processor, ("text",), conversations)


def _digits(
    processor: Any,
    kinds: Sequence[str],
    mixed: Callable[..., Mapping[str, dict]],
    usable: Callable[[Any], bool] = lambda row: True,
) -> dict[str, Example]:
    """The shortest and the longest of the first held-out rows of each kind, then mixtures of their media, by their names."""
    from zoo.data.digits import ROOT
    from zoo.data.sources.references import Access
    from zoo.data.sources.rows import make_row, read_rows

    rows = read_rows("digits:heldout")[:100]
    examples = {}
    for kind in kinds:
        encoded = [encode(processor, row, kind) for row in rows if row.kind == kind]
        encoded.sort(key=lambda example: example.length)
        examples[f"{kind}-short"], examples[f"{kind}-long"] = encoded[0], encoded[-1]
    files = [
        [getattr(row, media)[0] for row in rows if row.kind == kind and usable(row)] if kind in kinds else []
        for kind, media in (("image", "images"), ("video", "videos"), ("audio", "audios"), ("audio_in_video", "videos"))
    ]
    for name, item in mixed(*files).items():
        examples[name] = encode(processor, make_row(item, name, Access(ROOT)), name)
    return examples


def encode(processor: Any, row: Any, name: str) -> Example:
    """The row's sample, and the arguments of transformers' model."""
    return Example(name, *processor.encode_both(row, video_fps=2.0, max_frames=768))


SIZES = {"wide": (150, 40), "tall": (33, 71), "square": (90, 91), "long": (31, 200), "small": (17, 19)}
TILED: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {  # texts by turns, number of videos, sizes of images
    "wide": (("<image>Read.", "12"), 0, ("wide",)),
    "tall": (("Look: <image>", "3 4"), 0, ("tall",)),
    "square": (("<image>", "Nothing."), 0, ("square",)),
    "two": (("<image>and <image>Which?", "The first."), 0, ("square", "long")),
    "three": (("<image><image> <image>Count.", "3"), 0, ("small", "wide", "tall")),
    "turns": (("<image>Read.", "7", "And <image>?", "31 0"), 0, ("long", "small")),
    "text-short": (("Hi", "Ho"), 0, ()),
    "text-long": (("Say all the digits, one by one, twice.", "0 1 2 3 4 5 6 7 8 9 " * 2), 0, ()),
    "video": (("<video>Watch.", "5"), 1, ()),
    "image+video": (("<image><video>Both.", "6"), 1, ("tall",)),
    "video+video+image": (("<video> <video>, then <image>", "9 8"), 2, ("wide",)),
    "video+image+image": (("<video><image><image>", "0"), 1, ("wide", "small")),
}


def tile_examples(processor: Any) -> dict[str, Example]:
    """The rows of TILED, without videos where the processor takes none, with images drawn at random."""
    from zoo.data.sources.references import Access
    from zoo.data.sources.rows import make_row

    has_video, examples = "video" in processor.modalities, {}
    videos = _alike_videos() if has_video else []
    with TemporaryDirectory() as folder:
        for name, (texts, clips, sizes) in TILED.items():
            if has_video or not clips:
                images = [draw(Path(folder), f"{name}{i}", SIZES[one], len(name) + i) for i, one in enumerate(sizes)]
                row = dialogue(*texts, images=images, videos=videos[:clips])
                examples[name] = encode(processor, make_row(row, name, Access(Path(folder))), name)
    return examples


def draw(folder: Path, name: str, size: tuple[int, int], seed: int) -> str:
    """A picture of (width, height) random pixels; gives back its file's name."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / f"{name}.png")
    return f"{name}.png"


def _alike_videos() -> list[str]:
    """The two shortest videos of the digits that are as long, as transformers' model wants those of one call."""
    from zoo.data.digits import ROOT
    from zoo.data.media.decode import load_video
    from zoo.data.sources.rows import read_rows

    names = [str(ROOT / name) for row in read_rows("digits:heldout") for name in row.videos]
    by_frames: dict[int, list[str]] = {}
    for name in names:
        by_frames.setdefault(len(load_video(name, 2.0, 768)[0]), []).append(name)
    return by_frames[min(frames for frames, alike in by_frames.items() if len(alike) > 1)][:2]
