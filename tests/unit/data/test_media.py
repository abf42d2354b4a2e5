import wave

import numpy as np
import pytest
import torch
from PIL import Image

from zoo.data import media as module
from zoo.data.errors import RowError
from zoo.data.media import load_audio, load_image, load_video


def test_image_is_rgb_and_upright(tmp_path):
    pixels = np.zeros((4, 8), np.uint8)
    pixels[0, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    Image.fromarray(pixels).save(tmp_path / "x.png", exif=exif)
    image = load_image(tmp_path / "x.png")
    assert (image.mode, image.size) == ("RGB", (4, 8))
    assert image.getpixel((3, 0)) == (255, 255, 255)


def test_truncated_image_is_named(media, tmp_path):
    (tmp_path / "x.png").write_bytes((media / "a.png").read_bytes()[:500])
    with pytest.raises(RowError, match=r"x\.png can't be used: .*truncated") as caught:
        load_image(tmp_path / "x.png")
    assert caught.value.cause == "corrupt_media"


def test_file_that_is_no_image_is_named(tmp_path):
    (tmp_path / "x.png").write_text("hello")
    with pytest.raises(RowError, match="cannot identify image"):
        load_image(tmp_path / "x.png")


def test_decompression_bomb_is_refused(media, monkeypatch):
    monkeypatch.setattr(module, "MAX_PIXELS", 1000)
    with pytest.raises(RowError, match="96 x 64 pixels, over the limit of 1000"):
        load_image(media / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(RowError, match="decompression bomb"):
        load_image(media / "a.png")


@pytest.mark.parametrize("load", [load_image, lambda path: load_video(path, 2, 8), load_audio])
def test_missing_file(load, tmp_path):
    with pytest.raises(RowError, match=r"no file .*gone") as caught:
        load(tmp_path / "gone")
    assert caught.value.cause == "missing_file"


def test_video_frames_follow_the_rate(make, tmp_path):
    make.video(tmp_path / "x.mp4", [16 + 10 * i for i in range(20)], fps=10)  # 2 s
    frames, fps = load_video(tmp_path / "x.mp4", 2.0, 768)
    assert (frames.shape, frames.dtype, fps) == ((4, 3, 32, 64), torch.uint8, 2.0)
    means = frames.float().mean((1, 2, 3))
    torch.testing.assert_close(means, torch.tensor([16.0, 66.0, 116.0, 166.0]), atol=4, rtol=0)


def test_long_video_is_thinned_evenly_and_says_its_rate(make, tmp_path):
    make.video(tmp_path / "x.mp4", [16 + 10 * i for i in range(20)], fps=10)
    frames, fps = load_video(tmp_path / "x.mp4", 10.0, 5)
    assert (len(frames), fps) == (5, 2.5)
    means = frames.float().mean((1, 2, 3))
    torch.testing.assert_close(means, torch.tensor([16.0, 56.0, 96.0, 136.0, 176.0]), atol=4, rtol=0)


def test_short_video_is_held(make, tmp_path):
    make.video(tmp_path / "x.mp4", [200], fps=10)
    frames, fps = load_video(tmp_path / "x.mp4", 2.0, 768)
    assert (len(frames), fps) == (2, 2.0)
    assert torch.equal(frames[0], frames[1])


@pytest.mark.parametrize(
    ("name", "codec", "rate"),
    [
        ("x.wav", "pcm_s16le", 16000),
        ("x.wav", "pcm_f32le", 16000),
        ("x.wav", "pcm_s16le", 44100),
        ("x.flac", "flac", 16000),
        ("x.ogg", "libopus", 48000),
        ("x.mp3", "libmp3lame", 44100),
    ],
)
@pytest.mark.parametrize("layout", ["mono", "stereo"])
def test_audio_formats(make, tmp_path, name, codec, rate, layout):
    make.audio(tmp_path / name, make.tone(0.5, rate), codec, rate, layout)
    sound = load_audio(tmp_path / name)
    assert sound.dtype == np.float32
    assert sound.ndim == 1
    assert abs(len(sound) - 8000) < 1300  # lossy codecs pad
    assert np.abs(np.fft.rfft(sound[2000:6000])).argmax() == pytest.approx(110, abs=1)  # 440 Hz


def test_exact_samples_of_a_wav(make, tmp_path):
    make.audio(tmp_path / "x.wav", make.tone(0.5))
    np.testing.assert_allclose(load_audio(tmp_path / "x.wav"), make.tone(0.5), atol=1e-4)


def test_sound_track_of_a_video(media):
    assert len(load_audio(media / "spoken.mp4")) == pytest.approx(3 * 16000, abs=2100)


@pytest.mark.parametrize(
    ("load", "name", "words"),
    [
        (load_audio, "silent.mp4", "it has no audio track"),
        (lambda path: load_video(path, 2, 8), "a.wav", "it has no video track"),
        (load_audio, "rows.jsonl", "Invalid data"),
        (lambda path: load_video(path, 2, 8), "rows.jsonl", "Invalid data"),
    ],
)
def test_unfit_files_are_named(media, load, name, words):
    with pytest.raises(RowError, match=words) as caught:
        load(media / name)
    assert str(media / name) in str(caught.value)
    assert caught.value.cause == "corrupt_media"


def test_empty_track_is_refused(tmp_path):
    with wave.open(str(tmp_path / "x.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
    with pytest.raises(RowError, match="empty"):
        load_audio(tmp_path / "x.wav")


def test_cut_off_video_is_refused(media, tmp_path):
    data = (media / "silent.mp4").read_bytes()
    (tmp_path / "x.mp4").write_bytes(data[: len(data) // 3])
    with pytest.raises(RowError, match=r"x\.mp4 can't be used"):
        load_video(tmp_path / "x.mp4", 2, 8)
