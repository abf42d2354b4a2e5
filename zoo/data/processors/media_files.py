"""A row's media as its processor takes them, and what their headers say."""

from __future__ import annotations

from zoo.data.media.decoder import Decoder, Room
from zoo.data.media.sizes import Headers, headers_of
from zoo.data.sources.references import Medium, is_url
from zoo.data.sources.rows import PLACEHOLDER, Row


def load_media(
    row: Row, fps: float, max_frames: int, decoder: Decoder
) -> tuple[dict[str, list], float | None]:
    """The row's media as arguments of the HF processor, and the rate of its videos."""
    media: dict[str, list] = {}
    room = Room(decoder.megabytes)
    if row.images:
        media["images"] = [room.take(decoder.image(image, row)) for image in row.images]
    rate = None
    if row.videos:
        clips = []
        for video in row.videos:
            frames, taken = decoder.video(video, row, fps, max_frames)
            clips.append((room.take(frames), taken))
        # HF processors take one rate for all videos of a call, so a thinned one thins the others.
        rate = min(clip[1] for clip in clips)
        clips = [
            clip if clip[1] == rate else decoder.video(video, row, rate, max_frames)
            for video, clip in zip(row.videos, clips, strict=True)
        ]
        media["videos"] = [frames for frames, _ in clips]
    sounds = [room.take(decoder.audio(sound, row)) for sound in sound_files(row)]
    if sounds:
        media["audio"] = sounds
    return media, rate


def headers_of_row(row: Row, fps: float, max_frames: int, decoder: Decoder) -> Headers | None:
    """What the headers of the row's media say; None where a header does not hold what decoding will give."""
    sounds = sound_files(row)
    if any(is_url(medium) for medium in (*row.images, *row.videos, *sounds)):
        return None
    sizes = [decoder.image_size(image, row) for image in row.images]
    clips = [decoder.video_size(video, row) for video in row.videos]
    samples = [decoder.sound_samples(sound, row) for sound in sounds]
    images = [size for size in sizes if size is not None]
    videos = [clip for clip in clips if clip is not None]
    heard = [count for count in samples if count is not None]
    if (len(images), len(videos), len(heard)) != (len(sizes), len(clips), len(samples)):
        return None
    return headers_of(images, videos, heard, fps, max_frames)


def sound_files(row: Row) -> list[Medium]:
    """The row's sounds in the order in which they are heard, sound tracks of its videos included."""
    audios, videos = iter(row.audios), iter(row.videos)
    names = []
    for _, content in row.messages:
        for mark in PLACEHOLDER.findall(content):
            if mark == "audio":
                names.append(next(audios))
            elif mark == "video":
                video = next(videos)
                names += [video] if row.use_audio_in_video else []
    return names
