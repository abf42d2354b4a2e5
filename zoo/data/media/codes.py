"""The codes of a row's speech: out of its npy file, or by a user's codec, and held against the checkpoint of a talker."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, BinaryIO, ClassVar

import numpy as np
import torch
from torch import Tensor

from zoo.data.errors import RowError, corrupt_media
from zoo.data.media.decoder import Decoder
from zoo.data.media.opening import open_binary
from zoo.data.media.sizes import SOUND_RATE
from zoo.data.sample import Sample
from zoo.data.sources.formats.speech import MAX_FRAMES, checked_codes
from zoo.data.sources.references import Blob, MediaFile, is_url, shown
from zoo.data.sources.rows import Row
from zoo.errors import UserError
from zoo.packing.spoken import ANSWERS, COUNTS, EOS, FRAMES, SPEAKERS, WEIGHTS, SpeechTokens, SpokenRow, TurnTokens
from zoo.registry import imported
from zoo.user_code import calling

CODEC_RATE = 24_000  # Hz of what a user's codec encodes, that of the codecs of published talkers
MAX_CODES = 64 * MAX_FRAMES  # of a file: more is not read


def load_codes(row: Row) -> Tensor:
    """(frames, codebooks) int64 codes of a row with `speech`.

    RowError: a file that is missing ("missing_file"), no npy file of whole numbers ("corrupt_media"), or of another shape ("bad_row").
    """
    assert row.speech is not None
    source = row.opened(row.speech)
    assert isinstance(source, MediaFile | Blob)
    try:
        with open_binary(source) as file:
            shape, dtype = _npy_header(file)
            count = int(np.prod(shape, dtype=object))
            if dtype.kind not in "iu" or count > MAX_CODES:
                raise ValueError(f"it holds {count} values of {dtype}; whole numbers, at most {MAX_CODES}, are wanted")
            file.seek(0)
            codes = np.lib.format.read_array(file, allow_pickle=False)
    except RowError as error:
        raise error.at(row.source) from error
    except (OSError, ValueError, EOFError) as error:
        raise corrupt_media(source, "an npy file", str(error).rstrip(".")).at(row.source) from error
    try:
        return torch.from_numpy(checked_codes(codes, str(source))).long()
    except RowError as error:
        raise error.at(row.source) from error


def _npy_header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of an npy file; ValueError for another file."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype


def count_frames(row: Row, hertz: float | None, decoder: Decoder) -> int | None:
    """The frames of a row's speech by the header of its file; of a sound about as many as a codec of `hertz` makes. None where it does not tell."""
    assert row.speech is not None
    source = row.opened(row.speech)
    if not _is_npy(row):
        samples = None if hertz is None or is_url(row.speech) else decoder.sound_samples(row.speech, row)
        return None if samples is None or hertz is None else max(1, round(samples / SOUND_RATE * hertz))
    try:
        with open_binary(source) as file:  # type: ignore[arg-type]
            shape, _ = _npy_header(file)
            return int(shape[0]) if shape and shape[0] else None
    except (RowError, OSError, ValueError, EOFError):  # which encoding tells
        return None


@cache
def find_codec(name: str) -> Callable[[np.ndarray, int], Any]:
    """The function that data.codec names; UserError where there is none."""
    function = imported(name, "data.codec")
    if not callable(function):
        raise UserError(f"data.codec={name}: it is no function; one of a waveform and its rate is wanted")
    codec: Callable[[np.ndarray, int], Any] = function
    return codec


def with_codes(row: Row, codec: str, hertz: float | None, decoder: Decoder) -> Row:
    """The row with codes in the place of a speech that is a sound file; any other row as it is.

    Args:
        codec: data.codec; its function gets (N,) float32 mono and CODEC_RATE, and gives (frames, codebooks) or (frames,) whole numbers.
        hertz: frames a second, which those that come are held against; None: any are taken.

    Raises:
        RowError: a sound that can't be decoded, or that the codec refuses, or codes of another shape or number ("codec").
    """
    if row.speech is None or _is_npy(row):
        return row
    where = f"data.codec={codec}"
    try:
        samples = decoder.audio(row.speech, row, CODEC_RATE)
        with calling(where):
            codes = np.asarray(find_codec(codec)(samples, CODEC_RATE))
        codes = checked_codes(codes[:, None] if codes.ndim == 1 else codes, f"what {where} makes of {row.speech}")
    except RowError as error:
        raise error.at(row.source) from error
    except UserError:
        raise
    except Exception as error:  # of the user's function, whatever it raises
        text = f"{where} refuses {row.speech}: {type(error).__name__}: {error}."
        raise RowError(row.source, "codec", text) from error
    seconds = len(samples) / CODEC_RATE
    if hertz is not None and abs(len(codes) - hertz * seconds) > 2 + 0.02 * hertz * seconds:
        text = f"{where} makes {len(codes)} frames of the {seconds:.3g} s of {row.speech}; {hertz * seconds:.0f} are wanted, {hertz:g} a second."
        raise RowError(row.source, "codec", text)
    file = io.BytesIO()
    np.save(file, codes, allow_pickle=False)
    return replace(row, speech=Blob(file.getvalue(), str(row.speech)))


def _is_npy(row: Row) -> bool:
    """Whether a row's speech is a file of codes, or none that can be read, which `load_codes` tells."""
    assert row.speech is not None
    source = row.opened(row.speech)
    try:
        with open_binary(source) as file:  # type: ignore[arg-type]
            return bool(file.read(6) == b"\x93NUMPY")
    except (RowError, OSError):
        return True


@dataclass(frozen=True)
class SpeechCodes:
    """What a talker of transformers reads and says.

    limits: codes of each codebook; `generate` says none of the others.
    speakers: the code or token of each, by names in lower case.
    tokens: ids of the talker's sequences.
    turn: ids around an answer.
    """

    hertz: ClassVar[float | None] = None  # frames a second; None: it is not held against sounds
    hears_videos: ClassVar[bool] = True  # takes rows with use_audio_in_video

    limits: tuple[int, ...]
    speakers: Mapping[str, int]
    tokens: SpeechTokens
    turn: TurnTokens

    def voice(self, name: str) -> Mapping[str, Tensor]:
        """What the vocoder wants of a speaker, beside codes."""
        return {}

    def check(self, row: Row) -> None:
        """ValueError for a row whose answer the talker can't say, whatever it is."""
        if row.use_audio_in_video and not self.hears_videos:
            raise ValueError("use_audio_in_video is true: transformers' talker does not place the sound of a video")

    def add(self, row: Row, sample: Sample) -> Sample:
        """The sample with its speech among its media; ValueError for what does not fit the talker, RowError for a bad file."""
        if row.speech is None:
            raise ValueError("it has none; give it `speech`, or leave it out")
        self.check(row)
        speaker, frames = self.speaker(row.speaker), load_codes(row)
        if frames.shape[1] != len(self.limits):
            raise ValueError(
                f"its frames have {frames.shape[1]} codes; wanted {len(self.limits)}, one of each codebook"
            )
        if (silent := self.silent(frames)) is not None:
            raise ValueError(f"{silent} (zoo writes beginning, speaker and end itself)")
        spoken, said = self.spoken(sample, speaker, frames)
        if not bool((said.text[-len(frames) :] == EOS).any()):
            raise ValueError(
                f"it has {len(frames)} frames, fewer than the answer has tokens: the talker reads one a frame, and would never read the rest"
            )
        return spoken

    def silent(self, frames: Tensor) -> str | None:
        """The first of the frames (F, codebooks) with a code that is no sound, and what is wanted; None where there is none."""
        beyond = (frames >= torch.tensor(self.limits)).nonzero()
        if not len(beyond):
            return None
        frame, book = beyond[0].tolist()
        return (
            f"frame {frame} has code {int(frames[frame, book])} of codebook {book}; wanted 0 to {self.limits[book] - 1}"
        )

    def to_say(self, sample: Sample, speaker: str) -> Sample:
        """The sample with a speech of no frames yet; ValueError for an answer or a speaker that can't be spoken."""
        return self.spoken(sample, self.speaker(speaker), torch.zeros(0, len(self.limits), dtype=torch.int64))[0]

    def spoken(self, sample: Sample, speaker: int, frames: Tensor) -> tuple[Sample, SpokenRow]:
        """The sample, its last answer spoken as frames (F, codebooks), and the talker's sequence; ValueError for what can't be."""
        answer = self.turn.answer(sample.input_ids)
        said = self.tokens.row(sample.input_ids, frames, answer, speaker)
        weight = 1.0 if sample.weights is None else float(sample.weights[answer[0]])
        media = {
            FRAMES: frames,
            COUNTS: torch.tensor([len(frames)]),
            SPEAKERS: torch.tensor([speaker]),
            WEIGHTS: torch.tensor([weight]),
            ANSWERS: torch.tensor([answer]),
        }
        return replace(sample, media={**sample.media, **media}, codes=len(frames) + 1, code_weight=weight), said

    def speaker(self, name: str) -> int:
        """The code or token of a speaker; of the only one where none is named."""
        return self.speakers[self.known(name)]

    def known(self, name: str) -> str:
        """A speaker's name as `speakers` has it; ValueError for one that is not there."""
        known = ", ".join(sorted(self.speakers)) or "none"
        if not name:
            if len(self.speakers) == 1:
                return next(iter(self.speakers))
            raise ValueError(f"it has no speaker; the checkpoint has {known}")
        if name.lower() not in self.speakers:
            raise ValueError(f"speaker {shown(name)} is not in the checkpoint, which has {known}")
        return name.lower()
