"""Rows of real files for benches with data=: pages, videos and speech, and what they say.

    python -m benchmarks.media_rows FOLDER pages=600 videos=40 clips=100

- pages: JPEG, 640 to 1,280 pixels a side, full of drawn text; the answer is some of it.
- videos: H.264 in MP4, 1280 x 720, 4 seconds of 24 frames with a sound track; the answer is the text that moves through them.
- clips: FLAC and MP3 in turn, 3 to 12 seconds at 16 kHz; the answer is the pitches of their tones in words.

Writes rows.jsonl, in mixed order, and held.jsonl, each 50th of them (one at least). The same numbers give the same files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import av
import numpy as np
import soundfile
from PIL import Image, ImageDraw, ImageFont

from zoo.types import JsonObject

TEXT = (
    "river stone garden window paper winter market silver morning letter bridge forest candle harbour mirror summer engine violet "
    "pocket ladder basket copper island thunder velvet meadow carpet lantern pepper walnut ribbon marble saddle anchor blanket"
)
WORDS = TEXT.split()
TONES = {"low": 220.0, "middle": 440.0, "high": 880.0, "shrill": 1760.0}
RATE, FRAMES_A_SECOND, SECONDS = 16_000, 24, 4
Row = JsonObject


def page(folder: Path, number: int) -> Row:
    """A page of text, and its first lines as the answer."""
    draws = np.random.default_rng((1, number))
    width, height = (int(side) for side in draws.integers(640, 1281, 2))
    image = Image.new("RGB", (width, height), tuple(draws.integers(225, 256, 3).tolist()))
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=18)
    lines = [" ".join(draws.choice(WORDS, width // 75)) for _ in range(height // 26 - 1)]
    for row, line in enumerate(lines):
        pen.text((16, 12 + 26 * row), line, fill=(20, 20, 40), font=font)
    path = folder / f"page_{number}.jpg"
    image.save(path, quality=90)
    return _row("image", path, "Read the page.", "\n".join(lines[: int(draws.integers(4, 21))]))


def video(folder: Path, number: int) -> Row:
    """A text that moves over a changing ground, with a tone."""
    draws = np.random.default_rng((2, number))
    text, font = " ".join(draws.choice(WORDS, 3)), ImageFont.load_default(size=72)
    ground, path = draws.integers(0, 200, (9, 16, 3), dtype=np.uint8), folder / f"video_{number}.mp4"
    with av.open(path, "w") as container:
        pictures = container.add_stream("libx264", rate=FRAMES_A_SECOND, options={"preset": "ultrafast"})
        pictures.width, pictures.height, pictures.pix_fmt = 1280, 720, "yuv420p"
        audio = container.add_stream("aac", rate=RATE)
        audio.layout = "mono"
        for index in range(FRAMES_A_SECOND * SECONDS):
            frame = Image.fromarray(np.roll(ground, index // 6, axis=1)).resize((1280, 720))
            ImageDraw.Draw(frame).text((8 * index % 700, 300), text, fill="white", font=font)
            container.mux(pictures.encode(av.VideoFrame.from_image(frame)))
        container.mux(pictures.encode())
        for start in range(0, RATE * SECONDS, 1024):
            piece = _tone(440.0, np.arange(start, min(start + 1024, RATE * SECONDS)))
            block = av.AudioFrame.from_ndarray(piece[None].astype(np.float32), format="fltp", layout="mono")
            block.sample_rate, block.pts = RATE, start
            container.mux(audio.encode(block))
        container.mux(audio.encode())
    return _row("video", path, "Which words move through the picture?", text)


def clip(folder: Path, number: int) -> Row:
    """Tones of a second each, and how high they are."""
    draws = np.random.default_rng((3, number))
    names = draws.choice(list(TONES), int(draws.integers(3, 13)))
    samples = np.concatenate([_tone(TONES[name], np.arange(RATE)) for name in names])
    path = folder / f"clip_{number}.{'mp3' if number % 2 else 'flac'}"
    soundfile.write(path, samples, RATE)
    return _row("audio", path, "How high are the tones?", " ".join(names))


KINDS = {"pages": page, "videos": video, "clips": clip}


def write(folder: Path, counts: dict[str, int]) -> int:
    """Write so many files of each kind, and the rows; how many rows there are."""
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as workers:
        written = [
            row for name, count in counts.items() for row in workers.map(partial(KINDS[name], folder), range(count))
        ]
    rows = [written[index] for index in np.random.default_rng(0).permutation(len(written))]
    held = rows[::50]
    _write(folder / "held.jsonl", iter(held))
    _write(folder / "rows.jsonl", (row for index, row in enumerate(rows) if index % 50))
    return len(rows)


def _tone(pitch: float, samples: np.ndarray) -> np.ndarray:
    return 0.3 * np.sin(2 * np.pi * pitch * samples / RATE)


def _row(kind: str, path: Path, question: str, answer: str) -> Row:
    asked = [{"type": kind, kind: path.name}, {"type": "text", "text": question}]
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]
    return {"messages": turns}


def _write(path: Path, rows: Iterator[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Rows as the command line says; 2 where it says nothing that can be done."""
    folder, *rest = arguments or [""]
    counts = dict(word.partition("=")[::2] for word in rest)
    if not folder or not counts or not all(name in KINDS and n.isdecimal() for name, n in counts.items()):
        print(__doc__, file=sys.stderr)
        return 2
    print(f"{write(Path(folder), {name: int(n) for name, n in counts.items()})} rows in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
