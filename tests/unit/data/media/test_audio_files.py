"""Sound of several channels is the mean of its channels, whatever its container, codec, sample format and layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from zoo.data.media.decode import load_audio
from zoo.data.sources.references import Access, AudioSamples, Blob
from zoo.data.sources.rows import make_row
from zoo.errors import UserError

SECONDS = 1.5
PITCHES = (200.0, 300.0, 440.0, 60.0, 620.0, 900.0, 1200.0, 1500.0)  # Hz by channel; 5.1's fourth takes low ones only
COUNTS = {"mono": 1, "stereo": 2, "5.1": 6}

COMPRESSED = [
    ("x.mp3", "libmp3lame", 44100, ("mono", "stereo")),
    ("x.mp2", "mp2", 44100, ("mono", "stereo")),
    ("x.opus", "libopus", 48000, ("mono", "stereo", "5.1")),
    ("x.ogg", "libopus", 48000, ("mono", "stereo", "5.1")),
    ("x.m4a", "aac", 44100, ("mono", "stereo", "5.1")),
    ("x.aac", "aac", 48000, ("mono", "stereo", "5.1")),
    ("x.mp4", "aac", 48000, ("mono", "stereo", "5.1")),
    ("x.mkv", "ac3", 48000, ("mono", "stereo", "5.1")),
    ("x.ts", "eac3", 48000, ("mono", "stereo", "5.1")),
]
EXACT = [
    ("x.m4a", "alac", 44100),
    ("x.wv", "wavpack", 16000),
    ("x.mov", "pcm_u8", 16000),
    ("x.mkv", "pcm_s16le", 48000),
    ("x.mov", "pcm_s24le", 16000),
    ("x.avi", "pcm_s32le", 22050),
    ("x.mkv", "pcm_f32le", 16000),
    ("x.mkv", "pcm_f64le", 44100),
    ("x.wav", "pcm_s64le", 16000),
]


def tones(rate: int, channels: int, amplitude: float = 0.5) -> np.ndarray:
    """(channels, N) float32: a sine of its own pitch in each channel."""
    time = np.arange(round(SECONDS * rate)) / rate
    return np.stack([amplitude * np.sin(2 * np.pi * pitch * time) for pitch in PITCHES[:channels]]).astype(np.float32)


def same(rate: int, channels: int, amplitude: float = 0.5) -> np.ndarray:
    """(channels, N) float32: the same sine in each channel."""
    return np.repeat(tones(rate, 1, amplitude), channels, axis=0)


def write(path: Path, sound: np.ndarray, codec: str, rate: int, layout: str, picture: bool = False) -> None:
    """(channels, N) float32 as a file's sound track, beside a picture track or alone."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        if stream.bit_rate is not None and not codec.startswith(("pcm", "flac", "alac", "wavpack")):
            stream.bit_rate = 128_000 * max(len(sound) // 2, 1)
        video = container.add_stream("libx264", rate=5) if picture else None
        if video is not None:
            video.width, video.height, video.pix_fmt = 64, 32, "yuv420p"
            for _ in range(round(5 * SECONDS)):
                grey = np.full((32, 64, 3), 90, np.uint8)
                container.mux(video.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
            container.mux(video.encode(None))
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound), format="fltp", layout=layout)
        frame.sample_rate = rate
        fit = av.AudioResampler(stream.format, layout, rate, frame_size=stream.frame_size or 1024)
        parts = [part for part in [*fit.resample(frame), *fit.resample(None)] if part is not None]
        for part in [*parts, None]:
            container.mux(stream.encode(part))


def amplitudes(sound: np.ndarray, channels: int) -> list[float]:
    """How loud the pitch of each channel is in (N,) mono at 16 kHz."""
    middle = sound[4000:20000] * np.hanning(16000)
    spectrum = 2 * np.abs(np.fft.rfft(middle)) / np.hanning(16000).sum()
    return [float(spectrum[round(pitch) - 2 : round(pitch) + 3].max()) for pitch in PITCHES[:channels]]


def rms(sound: np.ndarray) -> float:
    return float(np.sqrt((sound[4000:20000].astype(np.float64) ** 2).mean()))


def hold_the_mean(path: Path, write_one: Any, channels: int, off: float) -> None:
    """A sine in all channels keeps its level; of a sine in each, every channel counts alike."""
    write_one(same)
    sound = load_audio(path)
    assert rms(sound) == pytest.approx(0.5 / np.sqrt(2), rel=off)
    assert np.abs(sound[4000:20000]).max() == pytest.approx(0.5, rel=2 * off)
    write_one(tones)
    assert amplitudes(load_audio(path), channels) == pytest.approx([0.5 / channels] * channels, rel=2 * off)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "codec", "rate", "layout"),
    [(name, codec, rate, layout) for name, codec, rate, layouts in COMPRESSED for layout in layouts],
)
def test_compressed_sound(tmp_path: Path, name: str, codec: str, rate: int, layout: str) -> None:
    path, channels = tmp_path / name, COUNTS[layout]
    hold_the_mean(path, lambda of: write(path, of(rate, channels), codec, rate, layout), channels, 0.06)


@pytest.mark.parametrize(("name", "codec", "rate"), EXACT)
@pytest.mark.parametrize("layout", ["mono", "stereo"])
def test_every_sample_format(tmp_path: Path, name: str, codec: str, rate: int, layout: str) -> None:
    path, channels = tmp_path / name, COUNTS[layout]
    hold_the_mean(path, lambda of: write(path, of(rate, channels), codec, rate, layout), channels, 0.01)


@pytest.mark.parametrize(("name", "codec"), [("x.mp4", "aac"), ("x.mkv", "libopus"), ("x.mkv", "pcm_s16le")])
@pytest.mark.parametrize("layout", ["stereo", "5.1"])
def test_the_sound_track_of_a_video(tmp_path: Path, name: str, codec: str, layout: str) -> None:
    path, channels = tmp_path / name, COUNTS[layout]
    how = (codec, 48000, layout)
    hold_the_mean(path, lambda of: write(path, of(48000, channels), *how, picture=True), channels, 0.03)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
@pytest.mark.parametrize("channels", [1, 2, 6])
def test_files_without_loss(tmp_path: Path, subtype: str, channels: int) -> None:
    path = tmp_path / "x.wav"
    hold_the_mean(path, lambda of: soundfile.write(path, of(44100, channels).T, 44100, subtype), channels, 0.01)


@pytest.mark.parametrize("name", ["x.mp3", "x.ogg", "x.flac", "x.aiff"])
def test_files_that_soundfile_wrote(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    hold_the_mean(path, lambda of: soundfile.write(path, of(44100, 2).T, 44100), 2, 0.03)


def test_a_compressed_file_is_as_loud_as_the_same_without_loss(tmp_path: Path) -> None:
    """Speech on one side, silence on the other, at full level: the mean never leaves -1 to 1."""
    sides = np.stack([same(48000, 1, 0.99)[0], np.zeros(round(SECONDS * 48000), np.float32)])
    both = np.repeat(sides[:1], 2, axis=0)
    for channels, level in ((sides, 0.495), (both, 0.99)):
        for name, codec in (("x.flac", "flac"), ("x.opus", "libopus"), ("x.m4a", "aac")):
            write(tmp_path / name, channels, codec, 48000, "stereo")
            assert amplitudes(load_audio(tmp_path / name), 1)[0] == pytest.approx(level, rel=0.06)


def test_bytes_and_channels_without_an_order(tmp_path: Path) -> None:
    """A layout that names no speakers (a WAV of three channels within Matroska) is the mean of its channels as well."""
    write(tmp_path / "x.mka", tones(16000, 3), "pcm_s16le", 16000, "3 channels")
    data = (tmp_path / "x.mka").read_bytes()
    for place in (tmp_path / "x.mka", Blob(data, "x.mka")):
        assert amplitudes(load_audio(place), 3) == pytest.approx([0.5 / 3] * 3, rel=0.02)


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int32, np.uint16, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("channels", [1, 2, 6])
def test_arrays(kind: Any, channels: int) -> None:
    """Whole numbers are samples as WAV files have them: unsigned ones with silence in the middle of their range."""

    def as_kind(sound: np.ndarray) -> np.ndarray:
        if np.dtype(kind).kind == "f":
            return sound.astype(kind)
        whole = np.iinfo(kind)
        middle = (int(whole.max) + 1) // 2 if whole.min == 0 else 0
        return np.round(sound * (int(whole.max) + 1 - middle) + middle).astype(kind)

    for array in (as_kind(same(16000, channels)), as_kind(same(16000, channels)).T):
        assert rms(load_audio(AudioSamples(array, 16000, "x"))) == pytest.approx(0.5 / np.sqrt(2), rel=0.01)
    mixed = load_audio(AudioSamples(as_kind(tones(16000, channels)), 16000, "x"))
    assert amplitudes(mixed, channels) == pytest.approx([0.5 / channels] * channels, rel=0.02)
    assert abs(mixed.mean()) < 0.01


def row_of(sound: Any) -> Any:
    item = {"messages": [{"role": "user", "content": "<audio>"}, {"role": "assistant", "content": "7"}], "audio": sound}
    return make_row(item, "x:1", Access(Path()))


def test_whole_numbers_of_a_data_set_keep_their_scale() -> None:
    """{"array", "sampling_rate"} with 16 bits is no louder than the same in floats."""
    quiet = same(16000, 1, 0.5)[0]
    whole = np.round(quiet * 32767).astype(np.int16)
    for array in (quiet, quiet.tolist(), whole, np.stack([whole, whole])):
        (sound,) = row_of({"array": array, "sampling_rate": 16000}).audios
        assert rms(load_audio(sound)) == pytest.approx(0.5 / np.sqrt(2), rel=0.01)


@pytest.mark.parametrize("array", [[0, 12000, -9000] * 500, np.arange(1500), [[1, 200] * 700] * 2])
def test_whole_numbers_of_unknown_range_are_refused(array: Any) -> None:
    for medium in (
        row_of({"array": array, "sampling_rate": 16000}).audios[0],
        AudioSamples(np.asarray(array), 16000, "x"),
    ):
        with pytest.raises(UserError, match=r"int64.*float32|float32.*int64"):
            load_audio(medium)


def test_older_pyav_resamples_without_a_number_of_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PyAV before 19 takes no `threads`."""
    soundfile.write(tmp_path / "x.wav", np.sin(np.arange(16000) / 20).astype(np.float32), 16000)
    wanted = load_audio(tmp_path / "x.wav", 8000)
    made = av.AudioResampler

    def older(format: str, layout: str, rate: int) -> Any:
        return made(format=format, layout=layout, rate=rate)

    monkeypatch.setattr(av, "AudioResampler", older)
    np.testing.assert_allclose(load_audio(tmp_path / "x.wav", 8000), wanted, atol=1e-6)
