"""A row's media as its processor takes them, and what their headers say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from PIL.Image import Image

from zoo.config.schema import DataConfig
from zoo.data.errors import NoSoundTrackError, RowError, bad_row
from zoo.data.media.decode import MIN_SOUND_SECONDS
from zoo.data.media.decoder import Decoder
from zoo.data.media.decoding_workers import decoder_for
from zoo.data.media.sampling import Pace, frames_taken, how_taken
from zoo.data.media.sizes import SOUND_RATE, ClipSize, Headers, ImageSize, VideoSize
from zoo.data.sources.formats.media_settings import MediaSettings
from zoo.data.sources.formats.tags import PLACEHOLDER
from zoo.data.sources.references import FrameList, Medium, is_url, settings_of_medium, without_settings
from zoo.data.sources.rows import Row

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class LoadedMedia:
    """A row's media, decoded.

    Attributes:
        arguments: of the HF processor, {"images", "videos", "audio"} as far as the row has them.
        paces: when the frames of each video are shown.
        silent: places of the videos that have no sound track, of a row whose videos are heard.
    """

    arguments: dict[str, list] = field(default_factory=dict)
    paces: list[Pace] = field(default_factory=list)
    silent: set[int] = field(default_factory=set)


class MediaMemory:
    """Counts the memory that the media of one row use."""

    def __init__(self, megabytes: int) -> None:
        self.megabytes, self.used = megabytes, 0

    def count[T: Image | np.ndarray | Tensor](self, decoded: T) -> T:
        """`decoded`, counted; RowError ("memory") where the row uses too much with it."""
        self.used += decoded.width * decoded.height * 3 if isinstance(decoded, Image) else decoded.nbytes
        if self.used > self.megabytes * 2**20:
            text = (
                f"the row's media take over {self.megabytes} MiB together once they are decoded; make them fewer or smaller, "
                "or raise data.row_mb."
            )
            raise bad_row(text, "memory")
        return decoded


def load_media(row: Row, fps: float, max_frames: int, decoder: Decoder | None) -> LoadedMedia:
    """The row's media.

    Raises:
        RowError: a file that is missing or broken, a part of a video or sound behind its end, or videos that are to be heard
            of which none has a sound track.
    """
    media = LoadedMedia()
    decoder = decoder or decoder_for(DataConfig())
    decoder.start(row)
    memory = MediaMemory(decoder.megabytes)
    if row.images:
        images = [memory.count(decoder.image(without_settings(image), row)) for image in row.images]
        media.arguments["images"] = images
    clips = []
    for video in row.videos:
        own_fps, own_max_frames, clip = how_taken(settings_of_medium(video), fps, max_frames)
        frames, rate = decoder.video(without_settings(video), row, own_fps, own_max_frames, clip)
        clips.append(memory.count(frames))
        media.paces.append(Pace(rate, clip.start))
    if clips:
        media.arguments["videos"] = clips
    heard: list[np.ndarray] = []
    missing: NoSoundTrackError | None = None
    for medium, video_number in _sounds(row):
        try:
            samples = memory.count(decoder.audio(without_settings(medium), row))
        except NoSoundTrackError as error:
            if video_number is None:
                raise
            media.silent.add(video_number)
            missing = error
            continue
        part = samples[_window(medium)]
        if len(part) < MIN_SOUND_SECONDS * SOUND_RATE:
            raise bad_row(
                f"the part of {medium} that is to be heard has under {MIN_SOUND_SECONDS:g} s, of "
                f"{len(samples) / SOUND_RATE:.3g} s of sound."
            )
        heard.append(part)
    if missing is not None and len(media.silent) == len(row.videos):
        raise missing
    if heard:
        media.arguments["audio"] = heard
    return media


def headers_of_media(media: LoadedMedia, row: Row) -> Headers:
    """The headers that decoded media would have."""
    images = tuple(ImageSize(image.height, image.width) for image in media.arguments.get("images", ()))
    videos = tuple(ClipSize(len(clip), *clip.shape[-2:]) for clip in media.arguments.get("videos", ()))
    samples = tuple(map(len, media.arguments.get("audio", ())))
    return Headers(images, videos, tuple(media.paces), samples, _settings(row.images), _settings(row.videos))


def headers_of_row(row: Row, fps: float, max_frames: int, decoder: Decoder | None) -> Headers | None:
    """The headers of the row's media; None where a header does not tell the size that decoding will give."""
    sounds = [medium for medium, _ in _sounds(row)]
    if any(map(is_url, (*row.images, *row.videos, *sounds))):
        return None
    decoder = decoder or decoder_for(DataConfig())
    decoder.start(row)
    images = [decoder.image_size(without_settings(image), row) for image in row.images]
    lengths = [decoder.video_size(without_settings(video), row) for video in row.videos]
    samples = [decoder.sound_samples(without_settings(medium), row) for medium in sounds]
    known_images = tuple(size for size in images if size is not None)
    known_lengths = [size for size in lengths if size is not None]
    known_samples = [count for count in samples if count is not None]
    if (len(known_images), len(known_lengths), len(known_samples)) != (len(images), len(lengths), len(samples)):
        return None
    clips = [_clip(video, size, fps, max_frames) for video, size in zip(row.videos, known_lengths, strict=True)]
    videos, paces = tuple(size for size, _ in clips), tuple(pace for _, pace in clips)
    heard = tuple(len(range(count)[_window(medium)]) for medium, count in zip(sounds, known_samples, strict=True))
    return Headers(known_images, videos, paces, heard, _settings(row.images), _settings(row.videos))


def _clip(video: Medium, size: VideoSize, fps: float, max_frames: int) -> tuple[ClipSize, Pace]:
    """The frames that are taken of a video, and when they are shown; RowError where its part begins behind its end."""
    fps, max_frames, clip = how_taken(settings_of_medium(video), fps, max_frames)
    is_list = isinstance(without_settings(video), FrameList)
    count, rate = frames_taken(size.seconds / fps if is_list else size.seconds, fps, max_frames, clip)
    return ClipSize(count, size.height, size.width), Pace(rate, clip.start)


def refuse_pixel_keys(row: Row, processor: str) -> None:
    """RowError ("bad_row") for pixels of a single medium, which a Hugging Face `processor` that sizes media by itself can't be given."""
    for kind, media in (("images", row.images), ("videos", row.videos)):
        for number, medium in enumerate(media):
            settings = settings_of_medium(medium)
            if settings is not None and settings.pixel_keys:
                where = f"{settings.pixel_keys[0]} of {kind}[{number}]"
                text = f"{where}: {processor} has no limits of pixels, as it sizes every image by itself; take it out."
                raise RowError(row.source, "bad_row", text)


def _settings(media: Sequence[Medium]) -> tuple[MediaSettings | None, ...]:
    """The settings of each medium; () where none has any."""
    settings = tuple(map(settings_of_medium, media))
    return settings if any(settings) else ()


def _window(medium: Medium) -> slice:
    """The samples of a sound that are heard."""
    settings = settings_of_medium(medium)
    if settings is None:
        return slice(None)
    end = None if settings.end is None else round(settings.end * SOUND_RATE)
    return slice(round((settings.start or 0.0) * SOUND_RATE), end)


def _sounds(row: Row) -> list[tuple[Medium, int | None]]:
    """The row's sounds in the order in which they are heard, and of the sound track of a video its place among the videos."""
    audios, videos = iter(row.audios), iter(enumerate(row.videos))
    sounds: list[tuple[Medium, int | None]] = []
    for _, content in row.messages:
        for mark in PLACEHOLDER.findall(content):
            if mark == "audio":
                sounds.append((next(audios), None))
            elif mark == "video":
                number, video = next(videos)
                sounds += [(video, number)] if row.use_audio_in_video else []
    return sounds
