"""Real rows of the bundled digits, mixtures of their media, and what transformers' processor makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("image", "multi_image", "video", "audio", "audio_in_video", "text")
MIXTURES = ("image+video+audio", "audio+video+image+image", "spoken+image+spoken+audio", "turns")
# The shortest and the longest of the first held-out rows of each kind; for audio, a clip under one second and one over two.
NAMES = (*(f"{kind}-{end}" for kind in KINDS for end in ("short", "long")), *MIXTURES)


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


def mixtures(rows: list[Any]) -> dict[str, dict]:
    """Rows with several media each, out of the files of `rows`, by the names in MIXTURES."""
    images = [row.images[0] for row in rows if row.kind == "image"]
    videos = [row.videos[0] for row in rows if row.kind == "video"]
    spoken = [row.videos[0] for row in rows if row.kind == "audio_in_video"]
    audios = [row.audios[0] for row in rows if row.kind == "audio"]

    def row(user: str, answer: str, **media: Any) -> dict:
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        return {"messages": messages, **media}

    return {
        "image+video+audio": row(
            "<image>Read it. <video>Watch.<audio>Listen.",
            "1 23",
            images=images[:1],
            videos=videos[:1],
            audios=audios[:1],
        ),
        "audio+video+image+image": row(
            "First <audio><video>, then <image> and<image>.",
            "9",
            audios=audios[:1],
            videos=videos[1:2],
            images=images[1:3],
        ),
        "spoken+image+spoken+audio": row(
            "<video><image> and <video>then <audio>",
            "5 67",
            videos=spoken[:2],
            images=images[:1],
            audios=audios[:1],
            use_audio_in_video=True,
        ),
        "turns": {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "<image>Read."},
                {"role": "assistant", "content": "7"},
                {"role": "user", "content": "And <image>?"},
                {"role": "assistant", "content": "31 0"},
            ],
            "images": images[:2],
        },
    }


def make_examples(processor: Any) -> dict[str, Example]:
    """The rows of NAMES through the family's processor."""
    rows = held_out()
    # Where one clip of several is under a second, transformers lets its neighbours change it; see the tests of the
    # audio tower.
    usable = [row for row in rows if row.kind != "audio" or _seconds(processor, row) > 1.05]
    return named_examples(processor, rows, KINDS, mixtures(usable))


def held_out() -> list[Any]:
    """The first held-out rows of the digits, some of every kind."""
    from zoo.data.sources.rows import read_rows

    return read_rows("digits:heldout")[:100]


def named_examples(
    processor: Any, rows: list[Any], kinds: Sequence[str], mixed: Mapping[str, dict]
) -> dict[str, Example]:
    """The shortest and the longest of `rows` of each kind, then the mixtures, by their names."""
    import zoo.data.digits
    from zoo.data.sources.references import Access
    from zoo.data.sources.rows import make_row

    root = Path(zoo.data.digits.__file__).parent
    examples = {}
    for kind in kinds:
        encoded = [encode(processor, row, kind) for row in rows if row.kind == kind]
        encoded.sort(key=lambda example: example.length)
        examples[f"{kind}-short"], examples[f"{kind}-long"] = encoded[0], encoded[-1]
    for name, item in mixed.items():
        examples[name] = encode(processor, make_row(item, name, Access(root)), name)
    return examples


def _seconds(processor: Any, row: Any) -> float:
    from zoo.data.media.decode import load_audio

    return len(load_audio(row.path(row.audios[0]))) / processor.hf.feature_extractor.sampling_rate


def encode(processor: Any, row: Any, name: str) -> Example:
    """The row's sample, and the arguments of transformers' model."""
    return Example(name, *processor.encode_both(row, video_fps=2.0, max_frames=768))
