import struct
import wave
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from zoo.data.errors import RowError
from zoo.data.media import decode as module
from zoo.data.media import images
from zoo.data.media.decode import load_audio, load_image, load_video
from zoo.data.sources.references import AudioSamples, Blob


@pytest.mark.parametrize(("size", "words"), [(500, "truncated"), (3, "cannot identify image")])
def test_broken_images_are_named(media, tmp_path, size, words):
    (tmp_path / "x.png").write_bytes((media / "a.png").read_bytes()[:size])
    with pytest.raises(RowError, match=rf"x\.png can't be used: .*{words}") as caught:
        load_image(tmp_path / "x.png")
    assert caught.value.cause == "corrupt_media"


def test_decompression_bomb_is_refused(media, monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 1000)
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


@pytest.mark.parametrize(
    ("count", "fps", "most", "levels", "rate"),
    [
        (20, 2.0, 768, [16, 66, 116, 166], 2.0),
        (20, 10.0, 5, [16, 56, 96, 136, 176], 2.5),  # thinned evenly
        (1, 2.0, 768, [16, 16], 2.0),  # held
    ],
)
def test_video_frames_follow_the_rate(make, tmp_path, count, fps, most, levels, rate):
    make.video(tmp_path / "x.mp4", [16 + 10 * i for i in range(count)], fps=10)
    frames, found_rate = load_video(tmp_path / "x.mp4", fps, most)
    assert (frames.shape, frames.dtype, found_rate) == ((len(levels), 3, 32, 64), torch.uint8, rate)
    torch.testing.assert_close(frames.float().mean((1, 2, 3)), torch.tensor(levels).float(), atol=4, rtol=0)


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


# ---------------------------------------------------------------- images that are good ones


RAMP = np.linspace(0, 255, 64).round().astype(np.uint8).reshape(8, 8)
COLOURS = np.stack([RAMP, RAMP[::-1], np.full_like(RAMP, 60)], axis=-1)


def shown(path) -> np.ndarray:
    image = load_image(path)
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def test_cmyk(tmp_path):
    Image.fromarray(COLOURS).convert("CMYK").save(tmp_path / "x.jpg", quality=100, subsampling=0)
    Image.fromarray(COLOURS).convert("CMYK").save(tmp_path / "x.tif")
    assert np.abs(shown(tmp_path / "x.tif") - COLOURS).max() <= 1
    assert np.abs(shown(tmp_path / "x.jpg") - COLOURS).max() <= 12


@pytest.mark.parametrize("name", ["x.png", "x.tif", "x.pgm"])
def test_grey_of_16_bits_is_scaled_and_not_cut_off(tmp_path, name):
    Image.fromarray(RAMP.astype(np.uint16) * 257).save(tmp_path / name)
    assert np.array_equal(shown(tmp_path / name), np.repeat(RAMP[..., None], 3, axis=-1))


def png(pixels: np.ndarray, bits: int, clear: list[int] | None = None) -> bytes:
    """A PNG of (H, W) grey or (H, W, 3) colours, which Pillow does not write; `clear` is its transparent colour."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    height, width = pixels.shape[:2]
    if bits == 16:
        lines = [row.astype(">u2").tobytes() for row in pixels]
    else:
        places = [1 << bit for bit in reversed(range(bits))]
        lines = [np.packbits([bool(v & place) for v in row for place in places]).tobytes() for row in pixels]
    head = struct.pack(">IIBBBBB", width, height, bits, 2 if pixels.ndim == 3 else 0, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + line for line in lines)))
    tail = b"" if clear is None else chunk(b"tRNS", struct.pack(f">{len(clear)}H", *clear))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + tail + body + chunk(b"IEND", b"")


def test_colours_of_16_bits(tmp_path):
    (tmp_path / "x.png").write_bytes(png(COLOURS.astype(np.uint16) * 257, 16))
    assert np.abs(shown(tmp_path / "x.png") - COLOURS).max() <= 1


@pytest.mark.parametrize(
    ("pixels", "bits", "clear", "wanted"),
    [
        ([[0, 5140, 30000, 65535]], 16, [5140], [0, 255, 117, 255]),
        ([[0, 1, 2, 3]], 2, [1], [0, 255, 170, 255]),
        ([[0, 1, 2, 15]], 4, [2], [0, 17, 255, 255]),
        ([[0, 1, 1, 0]], 1, [0], [255, 255, 255, 255]),
        ([[[0, 0, 0], [30000, 30000, 30000], [65535, 65535, 65535]]], 16, [30000] * 3, [0, 255, 255]),
    ],
)
def test_the_transparent_colour_of_a_png_shows_white(pixels, bits, clear, wanted, tmp_path):
    (tmp_path / "x.png").write_bytes(png(np.array(pixels), bits, clear))
    assert shown(tmp_path / "x.png")[0, :, 0].tolist() == wanted


@pytest.mark.parametrize("most", [255, 1023, 4095])
def test_12_bits_in_a_file_of_16_are_refused(most, tmp_path):
    """Scaled as 16 bits they would be nearly black."""
    grey = np.linspace(0, most, 64).reshape(8, 8).astype(np.uint16)
    Image.fromarray(grey).save(tmp_path / "x.tif")
    (tmp_path / "x.png").write_bytes(png(grey, 16))
    (tmp_path / "colours.png").write_bytes(png(np.dstack([grey] * 3), 16))
    for name in ("x.tif", "x.png", *(["colours.png"] if most > 255 else [])):
        with pytest.raises(RowError, match=r"65535 is white, and its brightest pixel has .*12 bits: times 16"):
            load_image(tmp_path / name)


def test_black_and_dim_images_of_16_bits_are_read(tmp_path):
    for most, seen in ((0, 0), (4096, 16)):
        Image.fromarray(np.full((8, 8), most, np.uint16)).save(tmp_path / "x.png")
        assert (shown(tmp_path / "x.png") == seen).all()


@pytest.mark.parametrize("name", ["x.png", "x.webp", "x.tif"])
def test_what_is_transparent_shows_white(tmp_path, name):
    """Black letters on nothing are the commonest such image, and black on black where alpha is dropped."""
    alpha = np.where(np.arange(8) < 4, 255, 0).astype(np.uint8)[:, None].repeat(8, 1)
    Image.fromarray(np.dstack([COLOURS // 2, alpha])).save(tmp_path / name, lossless=True)
    pixels = shown(tmp_path / name)
    assert (pixels[4:] == 255).all() and np.array_equal(pixels[:4], COLOURS[:4] // 2)


def test_transparent_grey_palette_and_half(tmp_path):
    mask = (np.arange(64).reshape(8, 8) < 32).astype(np.uint8)
    Image.fromarray(np.dstack([RAMP, mask * 255]), "LA").save(tmp_path / "grey.png")
    pixels = shown(tmp_path / "grey.png")
    assert (pixels[4:] == 255).all() and np.array_equal(pixels[:4, :, 0], RAMP[:4])
    image = Image.fromarray(mask, "P")
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.save(tmp_path / "palette.png", transparency=0)
    pixels = shown(tmp_path / "palette.png")
    assert (pixels[4:] == 255).all() and (pixels[:4] == [10, 20, 30]).all()
    Image.new("RGBA", (4, 4), (0, 0, 0, 128)).save(tmp_path / "half.png")
    assert np.abs(shown(tmp_path / "half.png") - 127).max() <= 1
    Image.fromarray(RAMP > 100).save(tmp_path / "bits.png")
    assert set(np.unique(shown(tmp_path / "bits.png"))) == {0, 255}


@pytest.mark.parametrize("turn", range(1, 9))
def test_every_exif_orientation(tmp_path, turn):
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = turn
    picture = Image.fromarray(np.repeat(np.repeat(COLOURS[:, :6], 8, 0), 8, 1))
    picture.save(tmp_path / "x.png", exif=exif)
    with Image.open(tmp_path / "x.png") as stored:
        wanted = ImageOps.exif_transpose(stored)
    assert load_image(tmp_path / "x.png").size == ((48, 64) if turn < 5 else (64, 48))
    assert np.array_equal(shown(tmp_path / "x.png"), np.asarray(wanted).astype(int))


@pytest.mark.parametrize("name", ["x.gif", "x.webp", "x.png"])
def test_an_animation_shows_its_first_frame(tmp_path, name):
    """However many frames follow, and however often it is to be repeated."""
    frames = [Image.new("RGB", (16, 16), (shade, shade, shade)) for shade in range(0, 250, 5)]
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], loop=0, lossless=True)
    assert shown(tmp_path / name).max() <= 2


def test_an_endless_gif_as_a_video_ends(tmp_path):
    frames = [Image.new("RGB", (16, 16), (shade, shade, shade)) for shade in (0, 80, 160, 240)]
    frames[0].save(tmp_path / "x.gif", save_all=True, append_images=frames[1:], loop=0, duration=500)
    taken, fps = load_video(tmp_path / "x.gif", 2.0, 8)
    assert fps == 2.0 and taken.float().mean((1, 2, 3)).round().tolist() == [0, 80, 160, 240]


# ---------------------------------------------------------------- long videos, bytes, sound


def write_long(path, frames: int, keys: int, fps: int = 25) -> None:
    """Grey frames that say their number (x 10 modulo 256), with a key frame every `keys`."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"g": str(keys), "crf": "10", "preset": "ultrafast"})
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for number in range(frames):
            pixels = np.full((32, 32, 3), number * 10 % 256, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))


@pytest.mark.parametrize("name", ["x.mp4", "x.mkv", "x.ts"])
@pytest.mark.parametrize("keys", [25, 60])
def test_jumps_to_key_frames_change_nothing(tmp_path, monkeypatch, name, keys):
    write_long(tmp_path / name, 1500, keys)
    found, fps = load_video(tmp_path / name, 2.0, 9)
    monkeypatch.setattr(module, "JUMP", 1e9)
    wanted, _ = load_video(tmp_path / name, 2.0, 9)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert fps == pytest.approx(9 / 60)


def test_a_video_of_very_many_frames_is_thinned_in_a_moment(tmp_path):
    """Frames between are neither decoded nor held: a hundred thousand here."""
    import time

    import av

    write_long(tmp_path / "x.mkv", 50, 50)
    with av.open(str(tmp_path / "x.mkv")) as given, av.open(str(tmp_path / "long.mkv"), "w") as made:
        packets = [packet for packet in given.demux(video=0) if packet.pts is not None]
        stream = made.add_stream_from_template(given.streams.video[0])
        for again in range(2000):
            for packet in packets:
                copy = av.Packet(bytes(packet))
                copy.stream, copy.time_base, copy.is_keyframe = stream, packet.time_base, packet.is_keyframe
                copy.pts = copy.dts = packet.pts + again * 2000
                made.mux(copy)
    began = time.monotonic()
    frames, fps = load_video(tmp_path / "long.mkv", 2.0, 16)
    assert len(frames) == 16 and fps == pytest.approx(16 / 4000, rel=0.01)
    assert time.monotonic() - began < 10


def test_too_many_pixels_of_a_video_are_refused(media, monkeypatch):
    monkeypatch.setattr(module, "MAX_VIDEO_MB", 0)
    with pytest.raises(RowError, match=r"4 frames of 64 x 32 pixels are over 0 MiB; lower data\.max_frames"):
        load_video(media / "silent.mp4", 2.0, 8)


def test_bytes_in_the_place_of_files(media):
    for name, load in (
        ("a.png", lambda source: np.asarray(load_image(source))),
        ("silent.mp4", lambda source: load_video(source, 2.0, 8)[0].numpy()),
        ("a.wav", load_audio),
        ("b.flac", load_audio),
        ("spoken.mp4", load_audio),
    ):
        assert np.array_equal(load(Blob((media / name).read_bytes(), name)), load(media / name))


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100])
def test_sound_as_an_array(make, rate):
    samples = make.tone(0.5, rate)
    for array in (samples, np.stack([samples] * 2)):
        audio = load_audio(AudioSamples(array, rate, "x"))
        assert audio.dtype == np.float32 and abs(len(audio) - 8000) < 50
        assert np.abs(np.fft.rfft(audio[2000:6000])).argmax() == pytest.approx(110, abs=1)


def test_a_stream_s_wav_has_no_length_and_is_read_to_its_end(make, tmp_path):
    make.audio(tmp_path / "x.wav", make.tone(0.5))
    data = bytearray((tmp_path / "x.wav").read_bytes())
    at = data.index(b"data") + 4
    data[at : at + 4] = b"\xff" * 4
    (tmp_path / "y.wav").write_bytes(data)
    np.testing.assert_allclose(load_audio(tmp_path / "y.wav"), make.tone(0.5), atol=1e-4)
