"""A row's media as its processor takes them, and what their headers say."""

from __future__ import annotations

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
from zoo.data.media.sizes import SOUND_RATE, ClipSize, Headers, ImageSize
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
            text = f"the row's media take over {self.megabytes} MiB together once they are decoded; make them fewer or smaller"
            raise bad_row(f"{text}, or raise data.row_mb.", "memory")
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
    images = [memory.count(decoder.image(without_settings(image), row)) for image in row.images]
    clips = []
    for video in row.videos:
        own_fps, own_max_frames, clip = how_taken(settings_of_medium(video), fps, max_frames)
        frames, rate = decoder.video(without_settings(video), row, own_fps, own_max_frames, clip)
        clips.append(memory.count(frames))
        media.paces.append(Pace(rate, clip.start))
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
            text = f"the part of {medium} that is to be heard has under {MIN_SOUND_SECONDS:g} s"
            raise bad_row(f"{text}, of {len(samples) / SOUND_RATE:.3g} s of sound.")
        heard.append(part)
    if missing is not None and len(media.silent) == len(row.videos):
        raise missing
    media.arguments = {
        kind: items for kind, items in (("images", images), ("videos", clips), ("audio", heard)) if items
    }
    return media


def headers_of_media(media: LoadedMedia, row: Row) -> Headers:
    """The headers that decoded media would have."""
    images = [ImageSize(image.height, image.width) for image in media.arguments.get("images", ())]
    videos = [ClipSize(len(clip), *clip.shape[-2:]) for clip in media.arguments.get("videos", ())]
    return _headers(row, images, videos, media.paces, list(map(len, media.arguments.get("audio", ()))))


def _headers(
    row: Row, images: list[ImageSize], videos: list[ClipSize], paces: list[Pace], sounds: list[int]
) -> Headers:
    """Headers with the settings of each medium, () where none has any."""
    settings = [tuple(map(settings_of_medium, media)) for media in (row.images, row.videos)]
    own_images, own_videos = (own if any(own) else () for own in settings)
    return Headers(tuple(images), tuple(videos), tuple(paces), tuple(sounds), own_images, own_videos)


def headers_of_row(row: Row, fps: float, max_frames: int, decoder: Decoder | None) -> Headers | None:
    """The headers of the row's media; None where a header does not tell the size that decoding will give.

    Raises:
        RowError: a part of a video begins behind its end.
    """
    sounds = [medium for medium, _ in _sounds(row)]
    if any(map(is_url, (*row.images, *row.videos, *sounds))):
        return None
    decoder = decoder or decoder_for(DataConfig())
    decoder.start(row)
    images = [decoder.image_size(without_settings(image), row) for image in row.images]
    lengths = [decoder.video_size(without_settings(video), row) for video in row.videos]
    samples = [decoder.sound_samples(without_settings(medium), row) for medium in sounds]
    if None in (*images, *lengths, *samples):
        return None
    clips, paces = [], []
    for video, size in zip(row.videos, filter(None, lengths), strict=True):
        own_fps, own_max_frames, clip = how_taken(settings_of_medium(video), fps, max_frames)
        seconds = size.seconds / own_fps if isinstance(without_settings(video), FrameList) else size.seconds
        count, rate = frames_taken(seconds, own_fps, own_max_frames, clip)
        clips.append(ClipSize(count, size.height, size.width))
        paces.append(Pace(rate, clip.start))
    heard = [len(range(count or 0)[_window(medium)]) for medium, count in zip(sounds, samples, strict=True)]
    return _headers(row, [size for size in images if size is not None], clips, paces, heard)


def refuse_pixel_keys(row: Row, processor: str) -> None:
    """RowError ("bad_row") for pixels of a single medium, which a Hugging Face `processor` that sizes media by itself can't be given."""
    for kind, media in (("images", row.images), ("videos", row.videos)):
        for number, medium in enumerate(media):
            settings = settings_of_medium(medium)
            if settings is not None and settings.pixel_keys:
                where = f"{settings.pixel_keys[0]} of {kind}[{number}]"
                text = f"{where}: {processor} has no limits of pixels, as it sizes every image by itself; take it out."
                raise RowError(row.source, "bad_row", text)


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
