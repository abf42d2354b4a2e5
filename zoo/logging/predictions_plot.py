"""plots/predictions.png of a run folder: held-out rows with their media, the answer and what the model says."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zoo.data.errors import RowError
from zoo.data.media.decoder import Decoder
from zoo.data.media.sampling import MIN_FRAMES, how_taken
from zoo.data.sources.formats.tags import PLACEHOLDER, plain
from zoo.data.sources.references import settings_of_medium
from zoo.data.sources.rows import Row
from zoo.files import replaced
from zoo.types import JsonObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RIGHT, WRONG, INK, QUIET, CARD = "#1a8f4b", "#c8313b", "#1d2433", "#6b7385", "#f6f7f9"
COLUMNS, PANELS, FRAMES = 2, 4, 4  # cards side by side, media of a card, frames of a video
LARGEST = 512  # pixels of a picture's longer side
_LINES = 3  # of a prompt
_ANSWER, _LONG_ANSWER, _ANSWER_WIDTH = 11.0, 8.0, 0.82  # points; a share of the texts' half of a card
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


@dataclass(frozen=True)
class Prediction:
    """A held-out row, its answer and the model's."""

    row: Row
    answer: str
    prediction: str
    right: bool
    reward: float | None = None  # where there are rewards

    @property
    def prompt(self) -> str:
        """The question before the answer, its media at the beginning left out and those within as [image]."""
        asked = [text for role, text in self.row.messages[:-1] if role == "user"]
        return _plain(asked[-1]) if asked else ""

    def as_dict(self) -> JsonObject:
        """A line of predictions.jsonl, but for its step."""
        row = self.row
        values = {"source": row.source, "kind": row.kind, "prompt": self.prompt, "answer": self.answer}
        reward = {} if self.reward is None else {"reward": self.reward}
        return {**values, "prediction": self.prediction, "right": self.right, **reward}


def block(step: int, predictions: Sequence[Prediction]) -> str:
    """The predictions as lines of text."""
    right = sum(prediction.right for prediction in predictions)
    lines = [f"answers to {len(predictions)} held-out rows at step {step}, {right} right:"]
    for prediction in predictions:
        wanted = "" if prediction.right else f", wanted {_short(prediction.answer)}"
        mark = "right" if prediction.right else "wrong"
        lines.append(f"  {mark}  {prediction.row.kind or 'row'}: {_short(prediction.prediction)}{wanted}")
    return "\n".join(lines)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 50 else f"{text[:50]} ...")


def plot_predictions(folder: Path, step: int, predictions: Sequence[Prediction], decoder: Decoder) -> Path:
    """Draw `folder`/plots/predictions.png, with media as `decoder` gives them; returns the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(predictions) // COLUMNS)
    figure = pyplot.figure(figsize=(13, 0.7 + 1.9 * rows), facecolor="white")
    right = sum(prediction.right for prediction in predictions)
    top = 1 - 0.62 / (0.7 + 1.9 * rows)
    title = f"{folder.resolve().name}: answers to held-out rows at step {step:,}"
    title = title if len(title) <= 80 else f"{ELLIPSIS}{title[-79:]}"
    figure.text(0.015, (1 + top) / 2, title, fontsize=13, weight="bold", color=INK, va="center", parse_math=False)
    score = f"{right} of {len(predictions)} right"
    figure.text(0.985, (1 + top) / 2, score, fontsize=12, color=QUIET, ha="right", va="center")
    grid = figure.add_gridspec(rows, COLUMNS, left=0.015, right=0.985, top=top, bottom=0.02, wspace=0.03, hspace=0.12)
    for number, prediction in enumerate(predictions):
        _card(figure, grid[number // COLUMNS, number % COLUMNS], prediction, decoder)
    path = folder / "plots" / "predictions.png"
    path.parent.mkdir(exist_ok=True)
    with replaced(path) as partial, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font has not
        figure.savefig(partial, dpi=100)
    pyplot.close(figure)
    return path


def _card(figure: Figure, spec: Any, prediction: Prediction, decoder: Decoder) -> None:
    """A row: media at the left, texts at the right, on a card with a coloured edge."""
    colour = RIGHT if prediction.right else WRONG
    back = figure.add_subplot(spec)
    back.set(xticks=[], yticks=[], facecolor=CARD, xlim=(0, 1), ylim=(0, 1))
    back.spines[:].set_visible(False)
    back.axvspan(0, 0.012, color=colour)
    left, text = spec.subgridspec(1, 2, width_ratios=(1.15, 1), wspace=0.02)
    panels = list(_panels(prediction.row, decoder))[:PANELS]
    widths = (0.06, *[1] * max(len(panels), 1), 0.02)
    inner = left.subgridspec(3, len(widths), width_ratios=widths, height_ratios=(0.06, 1, 0.06), wspace=0.06)
    for number, (kind, content) in enumerate(panels):
        (_draw_audio if kind == "sound" else _draw_image)(figure, inner[1, number + 1], content)
    if not panels:
        axis = figure.add_subplot(inner[1, 1])
        axis.set_axis_off()
        axis.text(0.5, 0.5, "text alone", ha="center", va="center", color=QUIET, style="italic")
    axis = figure.add_subplot(text)
    axis.set(xlim=(0, 1), ylim=(0, 1))
    axis.set_axis_off()
    style: JsonObject = {"va": "top", "parse_math": False, "transform": axis.transAxes}
    fit = _Fit(figure, axis)
    axis.text(0, 0.93, fit.lines(prediction.row.kind or "row", 8, 0.7, 1), fontsize=8, color=QUIET, **style)
    axis.text(0.98, 0.93, "\N{CHECK MARK} right" if prediction.right else "\N{BALLOT X} wrong", fontsize=10, color=colour, weight="bold", ha="right", **style)  # fmt: skip
    axis.text(0, 0.80, fit.lines(prediction.prompt, 8.5, 0.98, _LINES), fontsize=8.5, color=INK, **style)
    texts = ((0.42, "answer", prediction.answer, INK), (0.22, "model", prediction.prediction, colour))
    for y, name, said, shade in texts:
        axis.text(0, y, name, fontsize=8, color=QUIET, **style)
        text, size = fit.answer(said or "(nothing)")
        axis.text(0.17, y + 0.015, text, fontsize=size, color=shade, weight="bold", **style)


@dataclass(frozen=True)
class _Fit:
    """Breaks and cuts texts to the width that they take on a card, as its fonts measure them."""

    figure: Any
    axis: Axes

    def answer(self, text: str) -> tuple[str, float]:
        """An answer in one line, or a longer one in two lines of smaller letters; and the size of its letters."""
        text = " ".join(text.split())
        if self._width(text[:100], _ANSWER) <= _ANSWER_WIDTH and len(text) <= 100:
            return text, _ANSWER
        return self.lines(text, _LONG_ANSWER, _ANSWER_WIDTH, 2), _LONG_ANSWER

    def lines(self, text: str, size: float, width: float, most: int) -> str:
        """The text in at most so many lines of a width (a share of the axis); what is left out is an ellipsis."""
        rest = " ".join(text.split())
        lines: list[str] = []
        while rest and len(lines) < most:
            cut = self._longest(rest, size, width)
            if cut < len(rest):
                last = len(lines) == most - 1
                cut = self._longest(rest, size, width, ELLIPSIS) if last else self._at_space(rest, cut)
                lines.append(rest[:cut].rstrip() + (ELLIPSIS if last else ""))
            else:
                lines.append(rest)
            rest = rest[cut:].lstrip()
        return "\n".join(lines)

    def _longest(self, text: str, size: float, width: float, end: str = "") -> int:
        """How many letters of the text fit, at least one."""
        low, high = 1, min(len(text), 400)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._width(text[:middle] + end, size) <= width else (low, middle - 1)
        return low

    @staticmethod
    def _at_space(text: str, cut: int) -> int:
        """Index where the last whole word before `cut` ends; `cut` itself where that would leave half the line empty."""
        space = text.rfind(" ", 0, cut + 1)
        return space if space > cut // 2 else cut

    def _width(self, text: str, size: float) -> float:
        """The share of the axis that a line in bold letters takes."""
        from matplotlib.font_manager import FontProperties

        renderer = self.figure.canvas.get_renderer()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # letters that the font has not
            width, _, _ = renderer.get_text_width_height_descent(text, FontProperties(size=size, weight="bold"), False)
        return float(width) / float(self.axis.get_window_extent(renderer).width)


def _plain(text: str) -> str:
    while match := PLACEHOLDER.match(text.lstrip()):
        text = text.lstrip()[match.end() :]
    return " ".join(plain(PLACEHOLDER.sub(r" [\1] ", text)).split())


def _panels(row: Row, decoder: Decoder) -> Iterator[tuple[str, Any]]:
    """Media of a row in its order: pictures (height, width, 3) and sounds (samples,); those that can't be read are left out."""
    decoder.start(row)
    try:
        for image in row.images[:PANELS]:
            decoded = decoder.image(image, row)
            decoded.thumbnail((LARGEST, LARGEST))
            yield "picture", np.asarray(decoded)
        for video in row.videos[:PANELS]:
            fps, _, clip = how_taken(settings_of_medium(video), 1.0, FRAMES)
            frames, _ = decoder.video(video, row, fps, FRAMES, clip._replace(least=MIN_FRAMES, exactly=None))
            yield "picture", _strip(frames.permute(0, 2, 3, 1).numpy())
            if row.use_audio_in_video:
                yield "sound", decoder.audio(video, row)
        for audio in row.audios[:PANELS]:
            yield "sound", decoder.audio(audio, row)
    except RowError:
        return


def _strip(frames: np.ndarray) -> np.ndarray:
    """Frames (T, H, W, 3) in two columns, with white between them."""
    frames = frames[:, :: max(1, frames.shape[1] // 256), :: max(1, frames.shape[2] // 256)]
    count, height, width, _ = frames.shape
    gap = max(1, width // 24)
    columns = min(2, count)
    lines = -(-count // columns)
    whole = np.full((lines * (height + gap) - gap, columns * (width + gap) - gap, 3), 246, np.uint8)
    for number, frame in enumerate(frames):
        y, x = number // columns * (height + gap), number % columns * (width + gap)
        whole[y : y + height, x : x + width] = frame
    return whole


def _draw_image(figure: Figure, spec: Any, pixels: np.ndarray) -> None:
    axis = figure.add_subplot(spec)
    axis.imshow(pixels, interpolation="nearest" if max(pixels.shape) < 128 else "antialiased")
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_color("#d4d8e0")


def _draw_audio(figure: Figure, spec: Any, samples: np.ndarray) -> None:
    """The waveform above the spectrogram, up to 8 kHz, of 16 kHz samples."""
    upper, lower = spec.subgridspec(2, 1, height_ratios=(1, 1.6), hspace=0.03)
    seconds = len(samples) / 16000
    axis = figure.add_subplot(upper)
    pieces = np.array_split(np.abs(samples), min(300, len(samples)))
    peaks = np.array([piece.max() for piece in pieces])
    peaks = peaks / (peaks.max() or 1.0)
    axis.fill_between(np.linspace(0, seconds, len(peaks)), -peaks, peaks, color="#3b6ea8", linewidth=0)
    axis.set(xlim=(0, seconds), ylim=(-1.05, 1.05))
    axis.set_axis_off()
    axis = figure.add_subplot(lower)
    with np.errstate(divide="ignore"):
        power = _spectrogram(samples)
    axis.imshow(power, origin="lower", aspect="auto", cmap="magma", vmin=power.max() - 8, extent=(0, seconds, 0, 8))
    axis.set(xticks=[], yticks=[])
    axis.set_xlabel(f"{seconds:.1f} s", fontsize=7, color=QUIET, labelpad=1)


def _spectrogram(samples: np.ndarray, window: int = 400) -> np.ndarray:
    """(frequencies, times) log10 of the power."""
    padded = np.pad(samples, (0, max(0, window - len(samples))))
    hop = max(160, (len(padded) - window) // 400 or 160)
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop] * np.hanning(window)
    decibels: np.ndarray = np.log10(np.abs(np.fft.rfft(frames, 512)).T ** 2 + 1e-10)
    return decibels
