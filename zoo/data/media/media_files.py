"""A row's media as its processor takes them, and what their headers say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from zoo.config.schema import DataConfig
from zoo.data.errors import NoSoundTrackError, RowError
from zoo.data.media.decode import MIN_SOUND_SECONDS
from zoo.data.media.decoder import Decoder, MediaMemory
from zoo.data.media.decoding_workers import decoder_for
from zoo.data.media.sampling import Pace, how_taken
from zoo.data.media.sizes import SOUND_RATE, ClipSize, Headers, ImageSize, clip_of
from zoo.data.sources.formats.media_settings import MediaSettings
from zoo.data.sources.formats.tags import PLACEHOLDER
from zoo.data.sources.references import FrameList, Medium, is_url, settings_of_medium, without_settings
from zoo.data.sources.rows import Row


class SoundFile(NamedTuple):
    """A sound of a row."""

    medium: Medium
    video: int | None  # the place among the row's videos whose sound track it is


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


def load_media(row: Row, fps: float, max_frames: int, decoder: Decoder | None) -> LoadedMedia:
    """The row's media.

    Raises:
        RowError: a file that is missing or broken, a part of a video or sound behind its end, or videos that are to be heard
            of which none has a sound track.
    """
    media = LoadedMedia()
    decoder = decoder or decoder_for(DataConfig())
    decoder.start(row)
    room = MediaMemory(decoder.megabytes)
    if row.images:
        media.arguments["images"] = [room.take(decoder.image(without_settings(image), row)) for image in row.images]
    clips = []
    for video in row.videos:
        how = how_taken(settings_of_medium(video), fps, max_frames)
        frames, rate = decoder.video(without_settings(video), row, *how)
        clips.append(room.take(frames))
        media.paces.append(Pace(rate, how[2].start))
    if clips:
        media.arguments["videos"] = clips
    sounds: list[np.ndarray] = []
    missing: NoSoundTrackError | None = None
    for sound in sound_files(row):
        try:
            decoded = room.take(decoder.audio(without_settings(sound.medium), row))
        except NoSoundTrackError as error:
            if sound.video is None:
                raise
            media.silent.add(sound.video)
            missing = error
            continue
        sounds.append(_part_heard(decoded, sound.medium))
    if missing is not None and len(media.silent) == len(row.videos):
        raise missing
    if sounds:
        media.arguments["audio"] = sounds
    return media


def headers_of_media(media: LoadedMedia, row: Row) -> Headers:
    """What the headers of decoded media would say."""
    images = tuple(ImageSize(image.height, image.width) for image in media.arguments.get("images", ()))
    videos = tuple(ClipSize(len(clip), *clip.shape[-2:]) for clip in media.arguments.get("videos", ()))
    sounds = tuple(map(len, media.arguments.get("audio", ())))
    return Headers(images, videos, tuple(media.paces), sounds, *_settings(row))


def headers_of_row(row: Row, fps: float, max_frames: int, decoder: Decoder | None) -> Headers | None:
    """What the headers of the row's media say; None where a header does not hold what decoding will give."""
    sounds = sound_files(row)
    if any(is_url(medium) for medium in (*row.images, *row.videos, *(sound.medium for sound in sounds))):
        return None
    decoder = decoder or decoder_for(DataConfig())
    decoder.start(row)
    sizes = [decoder.image_size(without_settings(image), row) for image in row.images]
    lengths = [decoder.video_size(without_settings(video), row) for video in row.videos]
    samples = [decoder.sound_samples(without_settings(sound.medium), row) for sound in sounds]
    if None in sizes or None in lengths or None in samples:
        return None
    clips, paces = [], []
    for video, length in zip(row.videos, lengths, strict=True):
        if length is not None:
            listed = isinstance(without_settings(video), FrameList)
            clip, pace = clip_of(length, settings_of_medium(video), fps, max_frames, frames=listed)
            clips.append(clip)
            paces.append(pace)
    heard = tuple(
        len(range(count)[_window(sound.medium)])
        for sound, count in zip(sounds, samples, strict=True)
        if count is not None
    )
    images = tuple(size for size in sizes if size is not None)
    return Headers(images, tuple(clips), tuple(paces), heard, *_settings(row))


def refuse_pixel_keys(row: Row, processor: str) -> None:
    """RowError ("bad_row") for pixels of a single medium, which a Hugging Face `processor` that sizes media by itself can't be given."""
    for kind, media in (("images", row.images), ("videos", row.videos)):
        for number, medium in enumerate(media):
            settings = settings_of_medium(medium)
            if settings is not None and settings.pixel_keys:
                where = f"{settings.pixel_keys[0]} of {kind}[{number}]"
                text = f"{where}: {processor} has no limits of pixels, as it sizes every image by itself; take it out."
                raise RowError(row.source, "bad_row", text)


def _settings(row: Row) -> tuple[tuple[MediaSettings | None, ...], tuple[MediaSettings | None, ...]]:
    """The settings of each image and of each video; () where none has any."""

    def of(media: Sequence[Medium]) -> tuple[MediaSettings | None, ...]:
        found = tuple(map(settings_of_medium, media))
        return found if any(found) else ()

    return of(row.images), of(row.videos)


def _window(medium: Medium) -> slice:
    """The samples of a sound that are heard."""
    settings = settings_of_medium(medium)
    if settings is None:
        return slice(None)
    end = None if settings.end is None else round(settings.end * SOUND_RATE)
    return slice(round((settings.start or 0.0) * SOUND_RATE), end)


def _part_heard(sound: np.ndarray, medium: Medium) -> np.ndarray:
    part = sound[_window(medium)]
    if len(part) < MIN_SOUND_SECONDS * SOUND_RATE:
        seconds = len(sound) / SOUND_RATE
        text = (
            f"the part of {medium} that is to be heard has under {MIN_SOUND_SECONDS:g} s, of {seconds:.3g} s of sound."
        )
        raise RowError("", "bad_row", text)
    return part


def sound_files(row: Row) -> list[SoundFile]:
    """The row's sounds in the order in which they are heard, sound tracks of its videos included."""
    audios, videos = iter(row.audios), iter(enumerate(row.videos))
    found = []
    for _, content in row.messages:
        for mark in PLACEHOLDER.findall(content):
            if mark == "audio":
                found.append(SoundFile(next(audios), None))
            elif mark == "video":
                number, video = next(videos)
                found += [SoundFile(video, number)] if row.use_audio_in_video else []
    return found
