"""Make the bundled `digits` set: `python scripts/bundled_data/make_digits.py [OUT] [--seed N]`.

Writes OUT/train.jsonl, OUT/heldout.jsonl and OUT/{train,heldout}/ from scikit-learn's scans of
handwritten digits and from espeak-ng's speech, then reads everything back and checks it. The same seed
gives the same rows and, with the same versions of the encoders, the same bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import digit_media
import numpy as np
from digit_media import CELL, RATE

from zoo.data.digits import ROOT

MAX_BYTES = 2_000_000  # everything under OUT and the bundled tokenizer
MIN_APART = 2.0  # dB, mean difference between two voices' spectra
MAX_SPEECH = 2.2  # s, the longest spoken clip

KINDS = ("image", "multi_image", "video", "audio", "multi_audio", "audio_in_video", "text")
ROWS = {
    "train": dict(zip(KINDS, (1110, 690, 90, 490, 140, 30, 170), strict=True)),
    "heldout": dict(zip(KINDS, (80, 15, 15, 60, 15, 10, 15), strict=True)),
}
PROMPTS = {
    "image": ("Which digits?", "Read the digits.", "What is written here?", "Write the digits shown."),
    "multi_image": ("Read each image.", "Which digits are in each image?", "Read the images in order."),
    "video": ("Which digits appear?", "Read the digits in order.", "Write the digits shown, in order."),
    "audio": ("Which digits are said?", "Write the digits you hear.", "What is said?", "Transcribe."),
    "multi_audio": (
        "Transcribe each clip.",
        "Which digits are said in each clip?",
        "Write the digits of the clips in order.",
        "What is said in each?",
    ),
    "audio_in_video": (
        "Which digits are shown, and which are said?",
        "Write the digits shown, then the digits said.",
        "What do you see, and what do you hear?",
    ),
    "text": ("Copy {}.", "Repeat {}.", "Write {}.", "Say {} again."),
}
# accent -> espeak-ng's variants of it; "" is the plain voice
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {
        "en-us": ("", "f1", "f2", "f3", "m1", "m2", "m7", "Annie", "Alicia", "ed", "grandma", "Storm"),
        "en-gb": ("",),
        "en-gb-scotland": ("", "f2", "m5", "steph"),
        "en-029": ("", "f5", "m8", "linda"),
        "en-gb-x-rp": ("", "f1", "f3", "m2", "Andrea", "Diogo"),
        "en-us-nyc": ("f5", "m4", "grandpa", "belinda", "victor"),
        "en-gb-x-gbclan": ("f5", "m1", "anika", "Michael"),
        "en-gb-x-gbcwmd": ("f2", "m7", "aunty", "max"),
    },
    "heldout": {"en-us": ("f4",), "en-gb-x-rp": ("m3",)},
}
VOICES = {
    name: [f"{accent}+{variant}".rstrip("+") for accent in accents for variant in accents[accent]]
    for name, accents in VARIANTS.items()
}
GAPS = {"train": (0.03, 0.12), "heldout": (0.05, 0.25)}  # s, silence between words; half of it at the ends
TURNS = {
    "train": ((2, 5), (2, 5), (3, 9), (2, 9), (2, 5), (3, 6)),
    "heldout": ((2, 5),),
}  # least and most digits of each turn of text
PEAK = 0.6  # of full scale, the loudest sample of a train clip; data.augment varies it


class Deck:
    """Deals the items of a pool in shuffled rounds, so that each one comes up about equally often."""

    def __init__(self, pool: Sequence[int], rng: np.random.Generator) -> None:
        """`pool` holds scan numbers or digits."""
        self.pool, self.rng = list(pool), rng
        self.left: list[int] = []

    def deal(self, count: int) -> list[int]:
        """The next `count` items."""
        while len(self.left) < count:
            self.left += [self.pool[i] for i in self.rng.permutation(len(self.pool))]
        dealt, self.left = self.left[:count], self.left[count:]
        return dealt


@dataclass
class Split:
    """One split in the making: where it goes, what it draws from, and what it has drawn so far."""

    name: str
    out: Path
    seed: int
    rng: np.random.Generator  # of the kind in the making
    scans: np.ndarray  # [1797, 8, 8], 0..16
    labels: np.ndarray  # [1797], 0..9
    scan_deck: Deck
    speech_decks: list[Deck]  # one a voice, of the digits 0..9
    rows: list[dict] = field(default_factory=list)
    used_scans: Counter = field(default_factory=Counter)
    used_voices: Counter = field(default_factory=Counter)

    def begin(self, kind: str) -> None:
        """From here on draw for that kind, from a stream of its own: other kinds stay as they are when it changes."""
        self.rng = np.random.default_rng([self.seed, list(ROWS).index(self.name), KINDS.index(kind)])

    def path(self, stem: str, number: int, suffix: str) -> str:
        """A media file's path relative to the JSONL file."""
        return f"{self.name}/{stem}{number:04d}.{suffix}"

    def deal_scans(self, count: int) -> tuple[list[int], str]:
        """Scan numbers and the digits that they show."""
        numbers = self.scan_deck.deal(count)
        self.used_scans.update(numbers)
        return numbers, "".join(str(self.labels[i]) for i in numbers)

    def prompt(self, kind: str) -> str:
        """One of the kind's prompts."""
        return PROMPTS[kind][self.rng.integers(len(PROMPTS[kind]))]

    def cell(self, number: int, side: int = CELL) -> np.ndarray:
        """One scan as uint8 [side, side], shifted in the train split."""
        return digit_media.render(self.scans[number], side, self.rng if self.name == "train" else None)


# ---------------------------------------------------------------- handwriting


def layout(rng: np.random.Generator) -> tuple[int, int, int]:
    """A strip's lines, digits a line, and cell side in px."""
    style = rng.random()
    if style < 0.60:
        return 1, 1 + rng.choice(6, p=(0.18, 0.25, 0.22, 0.16, 0.11, 0.08)), CELL
    if style < 0.85:
        return 2, 1 + rng.choice(3, p=(0.45, 0.35, 0.20)), CELL
    return 1, 1 + rng.choice(3, p=(0.35, 0.45, 0.20)), 2 * CELL


def image_rows(split: Split, count: int) -> list[tuple[str, str]]:
    """Adds `count` rows of one strip; returns the strips' paths and digits."""
    split.begin("image")
    strips = []
    for number in range(count):
        lines, columns, side = layout(split.rng)
        scans, digits = split.deal_scans(lines * columns)
        cells = np.array([split.cell(scan, side) for scan in scans])
        page = cells.reshape(lines, columns, side, side).swapaxes(1, 2).reshape(lines * side, columns * side)
        path = split.path("i", number, "webp")
        digit_media.write_image(split.out / path, page)
        split.rows.append(row("image", "<image>" + split.prompt("image"), digits, images=[path]))
        strips.append((path, digits))
    return strips


def multi_image_rows(split: Split, count: int, strips: list[tuple[str, str]]) -> None:
    """Adds `count` rows of two to four of the strips of one digit."""
    split.begin("multi_image")
    short = [strip for strip in strips if len(strip[1]) == 1]
    for _ in range(count):
        chosen = [short[i] for i in split.rng.choice(len(short), 2 + split.rng.integers(3), replace=False)]
        marks = ("" if split.rng.random() < 0.7 else " then ").join(["<image>"] * len(chosen))
        content = marks + (". " if "then" in marks else "") + split.prompt("multi_image")
        answer = " ".join(digits for _, digits in chosen)
        split.rows.append(row("multi_image", content, answer, images=[path for path, _ in chosen]))


# ---------------------------------------------------------------- speech


def speech(split: Split, count: int, seconds: float | None = None) -> tuple[np.ndarray, str]:
    """`count` digits said by one voice, float32 [samples] at RATE in -1..1, and the digits.

    With `seconds` the clip is padded to that length, else it lasts at most MAX_SPEECH seconds. Gain and noise
    vary in the held-out split only.
    """
    rng, voices = split.rng, VOICES[split.name]
    which = sum(split.used_voices.values()) % len(voices)
    split.used_voices[voices[which]] += 1
    digits = split.speech_decks[which].deal(count)
    speed, pitch = int(rng.integers(190, 231)), int(rng.integers(38, 63))
    words = [digit_media.speak(digit, voices[which], speed, pitch) for digit in digits]
    gaps = rng.uniform(*GAPS[split.name], size=count + 1)  # s
    gaps[[0, -1]] *= 0.5
    room = (seconds or MAX_SPEECH) - sum(map(len, words)) / RATE
    gaps *= np.clip(room / gaps.sum(), 0, 1)
    parts = [np.zeros(int(gaps[0] * RATE), np.float32)]
    for word, gap in zip(words, gaps[1:], strict=True):
        parts += [word, np.zeros(int(gap * RATE), np.float32)]
    sound = np.concatenate(parts)
    sound *= PEAK / np.abs(sound).max()
    if split.name == "heldout":
        sound *= rng.uniform(0.25, 0.9) / PEAK
        sound += rng.normal(size=len(sound)) * 10 ** rng.uniform(-3.5, -2.7)
    if seconds is not None:
        sound = np.pad(sound, (0, max(0, int(seconds * RATE) - len(sound))))
    return sound.astype(np.float32).clip(-1, 1), "".join(map(str, digits))


def audio_rows(split: Split, count: int) -> list[tuple[str, str]]:
    """Adds `count` rows of 1..4 spoken digits; returns the clips' paths and digits."""
    split.begin("audio")
    clips = []
    for number in range(count):
        sound, digits = speech(split, 1 + split.rng.choice(4, p=(0.28, 0.4, 0.22, 0.1)))
        path = split.path("a", number, "ogg")
        digit_media.write_audio(split.out / path, sound)
        split.rows.append(row("audio", "<audio>" + split.prompt("audio"), digits, audios=[path]))
        clips.append((path, digits))
    return clips


def multi_audio_rows(split: Split, count: int, clips: list[tuple[str, str]]) -> None:
    """Adds `count` rows of two of the clips, mostly of two voices."""
    split.begin("multi_audio")
    for _ in range(count):
        chosen = [clips[i] for i in split.rng.choice(len(clips), 2, replace=False)]
        content = "<audio><audio>" + split.prompt("multi_audio")
        answer = " ".join(digits for _, digits in chosen)
        split.rows.append(row("multi_audio", content, answer, audios=[path for path, _ in chosen]))


# ---------------------------------------------------------------- video


def video_rows(split: Split, count: int) -> None:
    """Adds `count` silent clips of 2..6 digits."""
    split.begin("video")
    for number in range(count):
        scans, digits = split.deal_scans(2 + split.rng.choice(5, p=(0.25, 0.25, 0.2, 0.15, 0.15)))
        path = split.path("v", number, "mp4")
        digit_media.write_video(split.out / path, [split.cell(scan) for scan in scans], None)
        split.rows.append(row("video", "<video>" + split.prompt("video"), digits, videos=[path]))


def audio_in_video_rows(split: Split, count: int) -> None:
    """Adds `count` clips that show two or three digits, one a second, and say as many other ones."""
    split.begin("audio_in_video")
    for number in range(count):
        shown = 2 + int(split.rng.random() < 0.2)
        scans, seen = split.deal_scans(shown)
        sound, heard = speech(split, shown, seconds=digit_media.whole_packets(shown))
        path = split.path("s", number, "mp4")
        digit_media.write_video(split.out / path, [split.cell(scan) for scan in scans], sound)
        content = "<video>" + split.prompt("audio_in_video")
        extra = {"videos": [path], "use_audio_in_video": True}
        split.rows.append(row("audio_in_video", content, f"{seen} {heard}", **extra))


# ---------------------------------------------------------------- rows


def text_rows(split: Split, count: int) -> None:
    """Adds `count` conversations of text alone: numbers to say again, of as many digits as TURNS says.

    Rows of the train split have many short numbers: a few long ones are sooner known by heart than copied. Numbers
    whose digits sum up to 4 modulo 5 are in the held-out split only.
    """
    split.begin("text")
    for _ in range(count):
        turns = []
        for shortest, longest in TURNS[split.name]:
            number = ""
            while not number or (sum(map(int, number)) % 5 == 4) != (split.name == "heldout"):
                size = split.rng.integers(shortest, longest + 1)
                number = "".join(map(str, split.rng.integers(10, size=size)))
            turns.append((split.prompt("text").format(number), number))
        split.rows.append(conversation("text", turns))


def row(kind: str, content: str, answer: str, **extra: object) -> dict:
    """One JSONL row: a user's turn and an assistant's, with the media of `extra`."""
    return conversation(kind, [(content, answer)], **extra)


def conversation(kind: str, turns: Sequence[tuple[str, str]], **extra: object) -> dict:
    """One JSONL row of several questions and their answers."""
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    return {"kind": kind, "messages": messages, **extra}


def make_split(name: str, out: Path, seed: int) -> Split:
    """Makes one split's media and writes its shuffled rows."""
    rng = np.random.default_rng([seed, list(ROWS).index(name)])
    scans, labels = digit_media.load_scans()
    mine = [i for i in range(len(scans)) if (i % 5 == 4) == (name == "heldout")]
    speech_decks = [Deck(list(range(10)) * 5, rng) for _ in VOICES[name]]
    split = Split(name, out, seed, rng, scans, labels, Deck(mine, rng), speech_decks)
    shutil.rmtree(out / name, ignore_errors=True)
    (out / name).mkdir(parents=True)
    counts = ROWS[name]
    strips = image_rows(split, counts["image"])
    multi_image_rows(split, counts["multi_image"], strips)
    video_rows(split, counts["video"])
    clips = audio_rows(split, counts["audio"])
    multi_audio_rows(split, counts["multi_audio"], clips)
    audio_in_video_rows(split, counts["audio_in_video"])
    text_rows(split, counts["text"])
    order = rng.permutation(len(split.rows))
    lines = [json.dumps(split.rows[i], separators=(",", ":")) for i in order]
    (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return split


# ---------------------------------------------------------------- checks

MARKS = {"images": "<image>", "videos": "<video>", "audios": "<audio>"}


def read_rows(path: Path) -> list[dict]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_row(out: Path, item: dict) -> None:
    """Decodes a row's media and compares them with its placeholders and its answer's length."""
    content, answer = (
        " ".join(turn["content"] for turn in item["messages"] if turn["role"] == role) for role in ("user", "assistant")
    )
    parts = answer.split()
    assert all(part.isdecimal() and part.isascii() for part in parts), item
    for key, mark in MARKS.items():
        assert content.count(mark) == len(item.get(key, ())), item
    for path, part in zip(item.get("images", ()), parts, strict="images" in item):
        height, width = digit_media.read_image(out / path).shape
        digits = len(part)
        pages = {(1, digits), (2, digits // 2), (2, 2 * digits)}  # cells: one line, two, or big ones
        assert (height / CELL, width / CELL) in pages, item
    for path in item.get("videos", ()):
        assert digit_media.read_video(out / path).shape == (len(parts[0]) * digit_media.FPS, CELL, 2 * CELL), item
        if item.get("use_audio_in_video"):
            assert abs(len(digit_media.read_audio(out / path)) / RATE - len(parts[0])) < 0.05, item
    for path, _ in zip(item.get("audios", ()), parts, strict="audios" in item):
        assert 0.2 < len(digit_media.read_audio(out / path)) / RATE < MAX_SPEECH + 0.05, item


def check_voices(splits: dict[str, Split]) -> None:
    """Checks that every voice is heard, in one split only, with its variant, and that no two sound alike."""
    for name, split in splits.items():
        assert set(split.used_voices) == set(VOICES[name])
    variants = [{v for names in VARIANTS[name].values() for v in names} for name in VARIANTS]
    assert not set.intersection(*variants)
    voices = [voice for name in VOICES for voice in VOICES[name]]
    prints = [np.stack([digit_media.spectrum(digit_media.speak(d, v, 210, 50)) for d in range(10)]) for v in voices]
    for i, one in enumerate(prints):
        for j, other in enumerate(prints[:i]):
            apart = np.abs(one - other).mean()
            assert apart > MIN_APART, f"{voices[i]} and {voices[j]} sound alike: {apart:.2f} dB apart"


def check(out: Path, splits: dict[str, Split]) -> None:
    """Checks every row, that no scan, voice or file is in both splits, and the size of it all."""
    train, heldout = splits["train"], splits["heldout"]
    assert not set(train.used_scans) & set(heldout.used_scans)
    assert min(train.used_scans[i] for i in range(len(train.scans)) if i % 5 != 4) >= 2
    check_voices(splits)
    for name in splits:
        rows = read_rows(out / f"{name}.jsonl")
        assert Counter(item["kind"] for item in rows) == ROWS[name]
        named = {path for item in rows for key in MARKS for path in item.get(key, ())}
        assert named == {str(path.relative_to(out)) for path in (out / name).iterdir()}
        for item in rows:
            check_row(out, item)
    assert total_bytes(out) <= MAX_BYTES, f"{total_bytes(out)} bytes, more than {MAX_BYTES}"


def total_bytes(out: Path) -> int:
    """Bytes of everything under `out` and of the bundled tokenizer, less Python's caches."""
    files = (path for root in (out, ROOT.parent / "tokenizer") for path in root.rglob("*"))
    return sum(path.stat().st_size for path in files if path.is_file() and "__pycache__" not in path.parts)


def summary(out: Path) -> str:
    """A table of rows and bytes by split and kind; a file counts once, for the first kind that names it."""
    lines = [f"{'split':8} {'kind':15} {'rows':>5} {'files':>6} {'media bytes':>12} {'row bytes':>10}"]
    for name in ROWS:
        rows = read_rows(out / f"{name}.jsonl")
        seen: set[str] = set()
        for kind in KINDS:
            chosen = [item for item in rows if item["kind"] == kind]
            files = {path for item in chosen for key in MARKS for path in item.get(key, ())} - seen
            seen |= files
            size = sum((out / path).stat().st_size for path in files)
            text = sum(len(json.dumps(item, separators=(",", ":"))) + 1 for item in chosen)
            lines.append(f"{name:8} {kind:15} {len(chosen):5} {len(files):6} {size:12,} {text:10,}")
    return "\n".join([*lines, f"{total_bytes(out):,} bytes in all, with the tokenizer"])


def main() -> None:
    """Makes, checks and sums up the set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path, default=ROOT, help="where to write (zoo/data/digits)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    splits = {name: make_split(name, options.out, options.seed) for name in ROWS}
    check(options.out, splits)
    print(summary(options.out))


if __name__ == "__main__":
    main()
