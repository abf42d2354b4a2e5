"""Samples of sound: files without loss (WAV, FLAC, AIFF and their kin) through soundfile, and the levels of all others.

Compressed sound, and the sound of videos, is FFmpeg's to decode (`zoo.data.media.decode`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import BinaryIO

import av
import numpy as np
import soundfile

FORMATS = {"WAV", "WAVEX", "FLAC", "AIFF", "AU", "W64", "RF64", "CAF", "NIST"}
BLOCK = 2**21  # samples read at a time, of all channels: what the header says is not believed
# Bytes of a sample, and numpy's types of FFmpeg's sample formats.
BYTES = {"PCM_U8": 1, "PCM_16": 2, "PCM_24": 3, "PCM_32": 4, "FLOAT": 4, "DOUBLE": 8, "ULAW": 1, "ALAW": 1}
SAMPLES = {"u8": "u1", "s16": "i2", "s32": "i4", "s64": "i8", "flt": "f4", "dbl": "f8"}
MOST = 2**30  # samples of a file, whatever their rate: 4 GiB
UNKNOWN = 0x7FFF_0000  # bytes of sound, from which on a WAV's header means "not known": it was written as a stream


def read_wave(file: BinaryIO, max_seconds: float, corrupt: Callable[[str], Exception]) -> tuple[np.ndarray, int] | None:
    """(N,) float32 samples, mixed to mono, and their rate; None for a file of another kind.

    Args:
        file: an open binary file.
        max_seconds: longest sound that is read.
        corrupt: makes the error to raise of a reason.
    """
    try:
        wave = soundfile.SoundFile(file)
    except (soundfile.LibsndfileError, TypeError):
        return None  # FFmpeg may know it, and says better what is wrong
    with wave:
        if wave.format not in FORMATS:
            return None
        claimed, rate = wave.frames, wave.samplerate
        kind, width = wave.format, wave.channels * BYTES.get(wave.subtype, 0)
        parts, count = [], 0
        try:
            while len(part := wave.read(max(BLOCK // wave.channels, 1), dtype="float32", always_2d=True)):
                parts.append(part.mean(axis=1))
                count += len(part)
                if count > max_seconds * rate:
                    raise corrupt(f"it is over {max_seconds:g} s long; cut it into pieces")
                if count > MOST:
                    raise corrupt(f"it has over {MOST} samples, {rate} a second; save it with fewer")
        except soundfile.LibsndfileError as error:
            why = f"{str(error).rstrip('.')} at {count / rate:.1f} s of the {claimed / rate:.1f} s that its header says"
            raise corrupt(why) from error
    if kind in ("WAV", "WAVEX"):
        size = None  # bytes of sound that the RIFF header names
        file.seek(12)
        while size is None and len(head := file.read(8)) == 8:
            chunk = int.from_bytes(head[4:], "little")
            if head[:4] == b"data":
                size = chunk
            file.seek(chunk + chunk % 2, os.SEEK_CUR)
        claimed = size // width if width and size is not None and 0 < size < UNKNOWN else claimed
    if count < claimed < 2**60:
        seconds = f"its header says {claimed / rate:.1f} s of sound, but {count / rate:.1f} s are there"
        raise corrupt(f"{seconds}; it is cut off")
    return (np.concatenate(parts) if parts else np.zeros(0, np.float32)), rate


def channels_of(frame: av.AudioFrame) -> np.ndarray:
    """(channels, N) float32 samples of a decoded frame.

    Mono is their mean and none of FFmpeg's own mixtures: those weigh channels by their speakers, and in floats give
    the same sound in two channels 3 dB more than in one.
    """
    kind = frame.format
    dtype = SAMPLES[kind.name.removesuffix("p")]
    planes = [np.frombuffer(plane, dtype) for plane in frame.planes]
    if kind.is_planar:
        samples = np.stack([plane[: frame.samples] for plane in planes])
    else:
        count = frame.layout.nb_channels
        samples = planes[0][: frame.samples * count].reshape(-1, count).T
    return levels(samples)


def levels(samples: np.ndarray) -> np.ndarray:
    """Samples of any type as float32, about -1 to 1; whole numbers lie in the range of their type, unsigned ones around its middle."""
    if samples.dtype.kind == "f":
        return samples.astype(np.float32, copy=False)
    silence = 0 if samples.dtype.kind == "i" else int(np.iinfo(samples.dtype).max) // 2 + 1
    full = int(np.iinfo(samples.dtype).max) + 1 - silence
    return ((samples.astype(np.float64) - silence) / full).astype(np.float32)


def resampler_to(rate: int) -> av.AudioResampler:
    """A resampler of any sound to mono float32 of a rate."""
    try:
        # One thread: handing each short frame to another one takes eight times as long.
        return av.AudioResampler("flt", "mono", rate, threads=1)
    except TypeError:  # PyAV before 19 has no such argument
        return av.AudioResampler("flt", "mono", rate)
