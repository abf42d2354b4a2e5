"""Decode images, videos and sound: what the rows name, as plain arrays.

Every failure is a `RowError` that names the file and the reason, with cause "missing_file" or "corrupt_media". Videos
are decoded as a stream: only the frames that are kept are held (3 * H * W bytes each), and where they lie far apart the
decoder jumps to the key frame before each. Only known file types are opened: none that names further files, none that
another program would be started for. Imports no torch: decoding workers load this module alone.
"""

from __future__ import annotations

import bisect
import errno
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import av
import av.error
import numpy as np
from PIL import Image

from zoo.data.errors import NoSoundTrackError, RowError, corrupt_media
from zoo.data.media.audio_files import channels_of, levels, read_wave, resampler_to
from zoo.data.media.images import IMAGE_TYPES, MAX_PIXELS, rgb_of
from zoo.data.media.opening import open_binary
from zoo.data.media.sampling import WHOLE, Clip, frames_taken
from zoo.data.sources.references import AudioSamples, Blob, FrameList, MediaFile, OpenImage, missing_text
from zoo.files import why_no_file

if TYPE_CHECKING:
    from av.container import InputContainer
    from torch import Tensor

MAX_VIDEO_MB = 8192  # of the frames kept of one video, in MiB
MAX_SOUND_SECONDS = 4 * 3600  # of one sound: 0.9 GB at 16 kHz
TOO_LONG = f"it is over {MAX_SOUND_SECONDS} s long; cut it into pieces"
MIN_SOUND_SECONDS = 0.02  # of one sound: less gives no frame of a spectrogram
SMALL_FRAME = 256 * 256  # pixels; starting threads takes longer than decoding a clip of such frames
SOUND_BLOCK = 2**14  # samples that are resampled in one call
READ_BYTES = 2**18  # of a file that FFmpeg reads at once
JUMP = 2.0  # seconds that a key frame must lie ahead before the decoder jumps to it
CONTAINERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,apng,flv,mpegts,mpeg,mpegvideo,asf,ogg,m4v,h264,hevc,ivf,"
    "wav,w64,aiff,au,caf,flac,mp3,aac,ac3,eac3,amr,wv,tta,ape,mpc,opus,webp_pipe,y4m,yuv4mpegpipe,dv,mxf"
)  # demuxers of FFmpeg: no playlist, no list of other files

type File = str | Path | Blob | MediaFile
type Source = File | OpenImage | AudioSamples | FrameList


def load_image(source: Source) -> Image.Image:
    """An image as RGB, turned upright as its EXIF orientation says.

    An animation gives its first frame; 16 bits a channel become 8, 65535 being white; transparent pixels show white.

    Raises:
        RowError: no such file, not a whole image, no pixel or more than MAX_PIXELS, or 16 bits a channel of which the upper
            four are never in use.
    """
    if isinstance(source, OpenImage):
        return rgb_of(source.image, source)
    file = _existing(source)
    with _translated(file, "image"), open_binary(file) as data, Image.open(data, formats=IMAGE_TYPES) as image:
        return rgb_of(image, file)


def load_video(source: Source, fps: float, max_frames: int, clip: Clip = WHOLE) -> tuple[Tensor, float]:
    """`video_frames` as (T, 3, H, W)."""
    return as_frames(*video_frames(source, fps, max_frames, clip))


def as_frames(frames: np.ndarray, fps: float) -> tuple[Tensor, float]:
    """(T, H, W, 3) as (T, 3, H, W)."""
    import torch

    return torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous(), fps


def video_frames(source: Source, fps: float, max_frames: int, clip: Clip = WHOLE) -> tuple[np.ndarray, float]:
    """Frames of a video's first picture track, sampled at a steady rate.

    Sample i is the frame nearest to i / rate seconds after the clip's start; round(duration * fps) samples are taken, at
    least MIN_FRAMES (the last frame is held), and where that is more than `max_frames`, `max_frames` samples
    evenly over the whole clip, at the lower rate that is given back.

    Args:
        source: a file, or the frames of a video, which stand at the rate `fps`.
        fps: samples per second of video.
        max_frames: most samples taken, at least MIN_FRAMES.
        clip: the part that is taken.

    Returns:
        (T, H, W, 3) uint8 RGB frames, and the rate they stand at, in Hz.

    Raises:
        RowError: no such file, no picture track, no frame that can be decoded, or more pixels than MAX_VIDEO_MB holds.
    """
    if isinstance(source, FrameList):
        return _listed_frames(source, fps, max_frames, clip)
    file = _existing(source)
    with _translated(file, "video"), container_of(file) as container:
        if not container.streams.video:
            raise corrupt_media(file, "video", "it has no video track")
        stream = container.streams.video[0]
        if stream.width * stream.height <= SMALL_FRAME:
            stream.codec_context.thread_count = 1
        duration, keys = _timeline(container)
        count, fps = frames_taken(duration, fps, max_frames, clip)
        _check_size(file, count, stream.width, stream.height)
        container.seek(0)
        frames = _Frames(count, file)
        _nearest(container, [clip.start + index / fps for index in range(count)], keys, frames)
    if frames.pixels is None:
        raise corrupt_media(file, "video", "no frame of it can be decoded")
    return frames.pixels, fps


def _listed_frames(video: FrameList, fps: float, max_frames: int, clip: Clip) -> tuple[np.ndarray, float]:
    """The same of a video as a list of its frames."""
    last = len(video.images) - 1
    count, rate = frames_taken(len(video.images) / fps, fps, max_frames, clip)
    numbers = [min(round((clip.start + sample / rate) * fps), last) for sample in range(count)]
    image = load_image(video.images[numbers[0]])
    width, height = image.size
    _check_size(video, count, width, height)
    pixels = np.empty((count, height, width, 3), np.uint8)
    for sample, number in enumerate(numbers):
        if sample and number != numbers[sample - 1]:
            image = load_image(video.images[number])
        if image.size != (width, height):
            size = f"frame {number} has {image.width} x {image.height} pixels, those before {width} x {height}"
            raise corrupt_media(video, "video", f"{size}; make them one size")
        pixels[sample] = np.asarray(image)
    return pixels, rate


def load_audio(source: Source, rate: int = 16000) -> np.ndarray:
    """A file's first sound track (an audio file, or a video's sound), mixed to mono.

    Args:
        rate: samples per second wanted; the track is resampled to it.

    Returns:
        (N,) float32 samples, about -1 to 1.

    Raises:
        RowError: no such file, no sound track, no sample that can be decoded, samples that are no numbers, more than
            MAX_SOUND_SECONDS, or less than a file's header says.
    """
    source = source if isinstance(source, AudioSamples) else _existing(source)
    with _translated(source, "audio"):
        if isinstance(source, AudioSamples):
            samples = np.asarray(source.samples)
            if samples.ndim not in (1, 2) or samples.dtype.kind not in "fiu" or samples.dtype in (np.int64, np.uint64):
                shape = f"it is an array of shape {samples.shape} and dtype {samples.dtype}"
                wanted = "(N,) or (channels, N) float32 of -1 to 1, or whole numbers of 8, 16 or 32 bits, are wanted"
                raise corrupt_media(source, "audio", f"{shape}; {wanted}")
            samples = levels(samples)
            if samples.ndim == 2:  # the longer axis is time
                samples = samples.mean(axis=int(samples.shape[0] > samples.shape[1]))
            if len(samples) > MAX_SOUND_SECONDS * source.rate:
                raise corrupt_media(source, "audio", TOO_LONG)
            samples = _resampled(samples, source.rate, rate)
        else:
            with open_binary(source) as file:
                wave = read_wave(file, MAX_SOUND_SECONDS, lambda why: corrupt_media(source, "audio", why))
            samples = _decoded_sound(source, rate) if wave is None else _resampled(*wave, rate)
    reason = None
    if not len(samples):
        reason = "its audio track is empty"
    elif len(samples) < MIN_SOUND_SECONDS * rate:
        milliseconds = 1e3 * len(samples) / rate
        reason = f"it is {milliseconds:.3g} ms long, and {1e3 * MIN_SOUND_SECONDS:g} ms are the least"
    elif len(samples) > MAX_SOUND_SECONDS * rate:
        reason = TOO_LONG
    elif not np.isfinite(samples).all():
        reason = "its samples are not all numbers (NaN or infinite)"
    if reason is not None:
        raise corrupt_media(source, "audio", reason)
    return samples


def _decoded_sound(file: File, rate: int) -> np.ndarray:
    """Sound through FFmpeg, resampled."""
    with container_of(file) as container:
        if not container.streams.audio:
            raise NoSoundTrackError(*corrupt_media(file, "audio", "it has no audio track").args)
        resampler = resampler_to(rate)
        parts: list[np.ndarray] = []
        left = MAX_SOUND_SECONDS * rate
        for frame in itertools.chain(_mono_frames(container), [None]):
            # A track that already is as wanted passes through the resampler, which then answers the flush with a None.
            for part in resampler.resample(frame):
                parts += [] if part is None else [part.to_ndarray()[0]]
                left -= 0 if part is None else part.samples
            if left < 0:
                raise corrupt_media(file, "audio", TOO_LONG)
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _resampled(samples: np.ndarray, own_rate: int, rate: int) -> np.ndarray:
    """(N,) float32 at another rate."""
    if own_rate == rate or not len(samples):
        return samples
    resampler = resampler_to(rate)
    frame = _frame_of(samples, own_rate)
    parts = [part for part in [*resampler.resample(frame), *resampler.resample(None)] if part is not None]
    return np.concatenate([part.to_ndarray()[0] for part in parts]) if parts else samples[:0]


def _mono_frames(container: InputContainer) -> Iterator[av.AudioFrame]:
    """The first sound track as frames of mono, of SOUND_BLOCK samples or a little more: FFmpeg's own are short."""
    parts: list[np.ndarray] = []
    rate = 0
    for frame in container.decode(audio=0):
        if parts and (frame.sample_rate != rate or sum(map(len, parts)) >= SOUND_BLOCK):
            yield _frame_of(np.concatenate(parts), rate)
            parts = []
        rate = frame.sample_rate
        parts.append(channels_of(frame).mean(axis=0))
    if parts:
        yield _frame_of(np.concatenate(parts), rate)


def _frame_of(samples: np.ndarray, rate: int) -> av.AudioFrame:
    """(N,) samples as FFmpeg's frame of mono."""
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[None], np.float32), format="flt", layout="mono")
    frame.sample_rate = rate
    return frame


def _existing(source: Source) -> Blob | MediaFile:
    if isinstance(source, Blob):
        return source
    if isinstance(source, FrameList):
        raise NoSoundTrackError(*corrupt_media(source, "audio", "a list of frames has no audio track").args)
    path = Path(str(source))
    if why_no_file(path) is not None:
        raise RowError("", "missing_file", missing_text(path))
    return source if isinstance(source, MediaFile) else MediaFile(path)


@contextmanager
def _translated(source: object, kind: str) -> Iterator[None]:
    """Whatever a library raises of a medium becomes a RowError."""
    try:
        yield
    except RowError:
        raise
    except Exception as error:  # of many kinds, by what lies in the file
        text = (str(error) or type(error).__name__).rstrip(".")
        if isinstance(source, Blob) and "cannot identify image" in text:  # Pillow names the buffer's address
            text = "cannot identify image file"
        if kind != "image":
            text = getattr(error, "strerror", None) or text
            if getattr(error, "errno", None) == errno.EINVAL:  # of types that are not listed, too
                text = "Invalid data, or a file of a type that is not opened"
        raise corrupt_media(source, kind, text) from error


@contextmanager
def container_of(file: File) -> Iterator[InputContainer]:
    """FFmpeg's container of a file, of a known type and of no other file: `concat:a.mp4|b.mp4` is a name like others."""
    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}
    with open_binary(file) as data, av.open(data, "r", container_options=options, buffer_size=READ_BYTES) as container:
        yield container


def _check_size(source: object, count: int, width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise corrupt_media(source, "video", f"its frames have {width} x {height} pixels; scale it down")
    if count * width * height * 3 > MAX_VIDEO_MB * 2**20:
        text = f"{count} frames of {width} x {height} pixels are over {MAX_VIDEO_MB} MiB; lower data.max_frames"
        raise corrupt_media(source, "video", text)


def _timeline(container: InputContainer) -> tuple[float, list[tuple[float, int]]]:
    """Seconds of the first picture track, and its key frames as (seconds, pts), from its packets (not decoded)."""
    stream = container.streams.video[0]
    first, last, keys = None, 0, []
    for packet in container.demux(stream):
        if packet.pts is None or packet.is_discard:
            continue
        first = packet.pts if first is None else min(first, packet.pts)
        last = max(last, packet.pts + (packet.duration or 0))
        if packet.is_keyframe:
            keys.append((float(packet.pts * stream.time_base), packet.pts))
    duration = 0.0 if first is None else float((last - first) * stream.time_base)
    return duration, sorted(keys)


class _Frames:
    """The frames that are kept, written where they will stay."""

    def __init__(self, most: int, source: File) -> None:
        self.most, self.source, self.count = most, source, 0
        self.pixels: np.ndarray | None = None  # (most, H, W, 3)

    def add(self, frame: av.VideoFrame, times: int = 1) -> None:
        """Keep a frame, turned upright as the container says (phones film sideways)."""
        if self.pixels is None:  # a stream's header may say less than its frames have
            _check_size(self.source, self.most, frame.width, frame.height)
        turns = round(getattr(frame, "rotation", 0) / 90) % 4
        pixels = np.rot90(frame.to_ndarray(format="rgb24"), turns)
        if self.pixels is None:
            self.pixels = np.empty((self.most, *pixels.shape), np.uint8)
        if pixels.shape != self.pixels.shape[1:]:
            raise corrupt_media(self.source, "video", "its frames change their size; encode it with one size")
        self.pixels[self.count : self.count + times] = pixels
        self.count += times


def _nearest(container: InputContainer, times: list[float], keys: list[tuple[float, int]], kept: _Frames) -> None:
    """Keep, for each of the rising `times` (s after the first frame), the nearest frame."""
    first: float | None = None
    jumped: tuple[float, int] | None = None  # (seconds, pts) of the key frame jumped to
    while True:
        if jumped is not None:
            container.seek(jumped[1], stream=container.streams.video[0])
        seen, before, again = 0.0, None, False
        for index, frame in enumerate(container.decode(video=0)):
            now = frame.time if frame.time is not None else index / float(frame.rate or 1)
            if first is None:
                first = now
            if jumped is not None and before is None:
                if now < jumped[0]:  # shown before the key frame, and not whole without those before it
                    continue
                if now > jumped[0]:  # the file's index is wrong: decode all of it
                    keys, jumped, again, kept.count = [], None, True, 0
                    container.seek(0)
                    break
            while before is not None and times[kept.count] < (seen + now) / 2 - first:
                kept.add(before)
                if kept.count == len(times):
                    return
            before, seen = frame, now
            ahead = bisect.bisect_right(keys, (times[kept.count] + first, 2**63)) - 1
            if ahead >= 0 and keys[ahead][0] > now + JUMP:  # nothing wanted lies before it
                jumped, again = keys[ahead], True
                break
        if not again:
            if before is not None:
                kept.add(before, len(times) - kept.count)
            return
