"""A small audio codec, and rows whose answers are spoken: a tiny Qwen3-Omni says the digits that it reads or hears (docs/speech.md).

The codec is fitted and rows are written with sounds, of which `encode` makes codes; two models are trained, one to hear and one to say:

    python examples/say_digits.py
    zoo train recipe=demo run.dir=runs/demo
    zoo train recipe=demo train.speech_loss=1 data.train=runs/say_digits/train.jsonl data.eval=runs/say_digits/heldout.jsonl \\
      data.codec=examples/say_digits.py:encode data.outside_root=true data.augment=0.4 data.augment_variants=4 train.steps=400 \\
      run.dir=runs/say_digits/voice

Codes of the second one's answers become sounds, which the first one hears:

    zoo speak runs/say_digits/voice runs/say_digits/heldout.jsonl out=runs/say_digits/model audio=false talker_temperature=0
    python examples/say_digits.py runs/say_digits/model
    zoo eval runs/demo runs/say_digits/model/heard.jsonl
"""

import json
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.audio_utils import mel_filter_bank

from zoo.data.digits import ROOT
from zoo.data.media.decode import load_audio

FOLDER = Path("runs/say_digits")
SPEAKERS = ("ethan", "chelsie")
RATE, FRAME = 24_000, 1920  # Hz of data.codec's sounds; samples of a frame, 12.5 a second
BOOKS, CODES = 4, 32  # of the tiny Qwen3-Omni
WINDOW, HOP, BANDS = 960, 240, 64  # samples of a spectrum and between two; bands up to 8 kHz
FILTERS = torch.from_numpy(mel_filter_bank(WINDOW // 2 + 1, BANDS, 0.0, 8000.0, RATE, norm="slaney")).float().T


def encode(sound: np.ndarray, rate: int) -> Tensor:
    """(frames, BOOKS) codes of a sound (N,) at RATE Hz."""
    return quantised(spectra(sound), books())[0]


def decode(codes: Tensor) -> np.ndarray:
    """(frames * FRAME,) float32 sound of codes (frames, BOOKS)."""
    centres = [book[column] for book, column in zip(books(), codes.T, strict=True)]
    return sound_of(torch.stack(centres).sum(0))


@cache
def books() -> Tensor:
    """(BOOKS, CODES, FRAME / HOP * BANDS) centres that `write_rows` fitted."""
    return torch.from_numpy(np.load(FOLDER / "books.npy"))


def quantised(points: Tensor, books: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """(n, BOOKS) codes of points (n, width), each of what the books before it left, and what all leave (n, width)."""
    codes = []
    for book in books:
        codes.append(torch.cdist(points, book).argmin(1))
        points = points - book[codes[-1]]
    return torch.stack(codes, 1), points


def fitted(points: Tensor) -> Tensor:
    """(BOOKS, CODES, width) by residual k-means of points (n, width)."""
    found: list[Tensor] = []
    for _ in range(BOOKS):
        centres = points[torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:CODES]]
        for _ in range(20):
            codes = torch.cdist(points, centres).argmin(1)
            counts = torch.bincount(codes, minlength=CODES)[:, None]
            means = torch.zeros_like(centres).index_add_(0, codes, points) / counts.clamp(min=1)
            centres = torch.where(counts > 0, means, centres)
        found.append(centres)
        points = quantised(points, [centres])[1]
    return torch.stack(found)


def spectrum(wave: Tensor) -> Tensor:
    """(WINDOW / 2 + 1, N / HOP + 1) complex, of a sound (N,)."""
    return torch.stft(wave, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True)


def spectra(sound: np.ndarray) -> Tensor:
    """(frames, FRAME / HOP * BANDS) logarithms of mel spectra, those of a frame side by side."""
    frames = max(1, round(len(sound) / FRAME))
    wave = pad(torch.from_numpy(sound), (0, FRAME))[: frames * FRAME]
    bands = FILTERS @ spectrum(wave).abs()[:, :-1]
    return bands.clamp(min=1e-4).log().T.reshape(frames, -1)


def sound_of(spectra: Tensor) -> np.ndarray:
    """About the sound of these spectra, in phases by Griffin and Lim (1984)."""
    bands, length = spectra.reshape(-1, BANDS).exp().T, len(spectra) * FRAME
    sizes = torch.ones(FILTERS.shape[1], bands.shape[1])
    for _ in range(100):  # non-negative least squares, by Lee and Seung (2001)
        sizes *= (FILTERS.T @ bands) / (FILTERS.T @ (FILTERS @ sizes) + 1e-9)
    sizes = pad(sizes, (0, 1))
    phases = torch.exp(6.283j * torch.rand(sizes.shape, generator=torch.Generator().manual_seed(0)))
    for _ in range(40):
        wave = torch.istft(sizes * phases, WINDOW, HOP, window=torch.hann_window(WINDOW), length=length)
        phases = torch.sgn(spectrum(wave))
    return (wave / wave.abs().max().clamp(min=1)).numpy()


def digits(split: str) -> list[tuple[dict[str, Any], str]]:
    """Bundled rows with a strip or a sound of up to four digits, media by absolute paths, and the digits."""
    found = []
    for item in map(json.loads, (ROOT / f"{split}.jsonl").open()):
        answer = item["messages"][-1]["content"]
        if item["kind"] in ("image", "audio") and len(answer) <= 4:
            media = {key: [str(ROOT / name) for name in item[key]] for key in ("images", "audios") if key in item}
            found.append((item | media, answer))
    return found


def write_rows() -> None:
    """Fit the codec to training sounds; have digits said by each speaker's clips, which are those that the codec keeps best."""
    sounds = [(load_audio(item["audios"][0], RATE), said) for item, said in digits("train") if "audios" in item]
    (FOLDER / "sounds").mkdir(parents=True, exist_ok=True)
    np.save(FOLDER / "books.npy", fitted(torch.cat([spectra(sound) for sound, _ in sounds])).numpy())
    clips: dict[str, list[tuple[float, np.ndarray]]] = {digit: [] for digit in "0123456789"}
    for sound, said in sounds:
        if len(said) == 1:
            whole = np.pad(sound, (0, -len(sound) % FRAME))  # of frames
            clips[said].append((float(quantised(spectra(whole), books())[1].square().mean()), whole))
    best = {digit: [clip for _, clip in sorted(own, key=lambda one: one[0])] for digit, own in clips.items()}
    for split in ("train", "heldout"):
        rows = []
        for number, (item, said) in enumerate(digits(split)):
            speaker, name = number % 2, f"sounds/{split}{number}.flac"
            soundfile.write(FOLDER / name, np.concatenate([best[digit][speaker] for digit in said]), RATE)
            rows.append(item | {"speech": name, "speaker": SPEAKERS[speaker]})
        write(FOLDER / f"{split}.jsonl", rows)


def write_heard(folder: Path) -> None:
    """Sounds of what `zoo speak` wrote into a folder, and `heard.jsonl`, whose answers are what should have been said."""
    wanted = [said for _, said in digits("heldout")]
    rows = []
    for name in sorted((folder / "speech").glob("*.npy")):
        soundfile.write(name.with_suffix(".wav"), decode(torch.from_numpy(np.load(name)).long()), RATE)
        question, answer = {"role": "user", "content": "<audio>What is said?"}, wanted[int(name.stem)]
        said = {"role": "assistant", "content": answer}
        rows.append({"kind": "audio", "messages": [question, said], "audios": [f"speech/{name.stem}.wav"]})
    print(f"{len(rows)} of {len(wanted)} rows were said to their end")
    write(folder / "heard.jsonl", rows)


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """A file of rows."""
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"{len(rows)} rows in {file}")


if __name__ == "__main__":
    write_heard(Path(sys.argv[1])) if sys.argv[1:] else write_rows()
