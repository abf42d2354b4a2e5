"""Pictures and speech of the `digits` set: drawing, speaking, encoding and decoding."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from av.container import OutputContainer

CELL = 32  # px, the side of a digit's cell
FPS = 2  # video frames a second; a digit is shown for FPS equal frames
RATE = 16_000  # Hz, mono sound
OPUS_BPS = 10_000  # bits a second
IMAGE_QUALITY = 20  # of WebP, 0 to 100: strokes this large keep their shape
OPUS_PACKET = 960  # samples, 60 ms
OPUS_DELAY = 104  # samples, what libopus puts before the sound
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def load_scans() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits: scans [1797, 8, 8] of 0..16, labels [1797]."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit(
            "scikit-learn holds the handwritten digits: install it with `pip install scikit-learn`."
        ) from error
    data = load_digits()
    return data.images, data.target


def render(scan: np.ndarray, side: int, rng: np.random.Generator | None) -> np.ndarray:
    """A scan [8, 8] of 0..16 as white ink on black, uint8 [side, side], enlarged smoothly (bicubic).

    With `rng` it is shifted by up to 2 px of 32 each way.
    """
    from PIL import Image

    ink = Image.fromarray(np.round(scan * 255 / 16).astype(np.uint8))
    large = np.asarray(ink.resize((side, side), Image.Resampling.BICUBIC))
    step = side // 16  # px
    down, right = rng.integers(-step, step + 1, size=2) if rng is not None else (0, 0)
    padded = np.pad(large, step)
    return padded[step - down : step - down + side, step - right : step - right + side]


def write_image(path: Path, pixels: np.ndarray) -> None:
    """uint8 [height, width] as WebP: a third of a PNG's bytes for smooth strokes."""
    from PIL import Image

    Image.fromarray(pixels).save(path, "WEBP", quality=IMAGE_QUALITY, method=6)


def speak(digit: int, voice: str, speed: int, pitch: int) -> np.ndarray:
    """One digit said by espeak-ng, float32 [samples] at RATE without silence around it.

    Speed is in words a minute, pitch is espeak-ng's 0..99.
    """
    from scipy.signal import resample_poly  # type: ignore[import-untyped]

    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", WORDS[digit]]
    try:
        wav = subprocess.run(command, capture_output=True, check=True).stdout
    except FileNotFoundError as error:
        raise SystemExit("espeak-ng says the digits: install it with `apt-get install espeak-ng`.") from error
    rate = int.from_bytes(wav[24:28], "little")  # Hz; a streamed WAV header has no usable length
    sound = resample_poly(np.frombuffer(wav[44:], "<i2") / 32768, RATE, rate)
    loud = np.flatnonzero(np.abs(sound) > 0.01 * np.abs(sound).max())
    return sound[loud[0] : loud[-1] + 1].astype(np.float32)


def spectrum(sound: np.ndarray) -> np.ndarray:
    """Mean level in dB of 32 bands of 250 Hz, [32], of float32 [samples] at RATE scaled to a peak of 1."""
    frames = np.lib.stride_tricks.sliding_window_view(sound / np.abs(sound).max(), 512)[::160]
    power = np.abs(np.fft.rfft(frames * np.hanning(512))[:, :256]) ** 2
    return 10 * np.log10(power.mean(axis=0).reshape(32, 8).mean(axis=1) + 1e-6)


def whole_packets(seconds: float) -> float:
    """The longest sound of at most `seconds` that fills Opus packets; mp4 can't say where to cut the last."""
    return (seconds * RATE // OPUS_PACKET * OPUS_PACKET - OPUS_DELAY) / RATE


def add_sound(container: OutputContainer, sound: np.ndarray) -> None:
    """Muxes a new Opus stream of float32 [samples] at RATE into an open PyAV container."""
    import av

    options = {"frame_duration": str(1000 * OPUS_PACKET // RATE), "application": "voip", "vbr": "on"}
    stream = container.add_stream("libopus", rate=RATE, layout="mono", options=options)
    stream.bit_rate = OPUS_BPS
    stream.codec_context.flags |= av.codec.context.Flags.bitexact
    samples = np.round(sound * 32767).astype(np.int16)[None]
    frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
    frame.sample_rate = RATE
    container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def write_video(path: Path, cells: list[np.ndarray], sound: np.ndarray | None) -> None:
    """H.264 in mp4: each uint8 [CELL, CELL] for a second, twice as wide."""
    import av
    from av.bitstream import BitStreamFilterContext
    from PIL import Image

    with av.open(str(path), "w", container_options={"fflags": "bitexact"}) as container:
        options = {"crf": "28", "preset": "veryslow", "tune": "stillimage", "bf": "0", "threads": "1"}
        options |= {"mbtree": "0", "rc-lookahead": "0"}  # smaller at this size
        stream = container.add_stream("libx264", rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = 2 * CELL, CELL, "yuv420p"
        packets = []
        for cell in cells:
            page = np.full((CELL * 3 // 2, 2 * CELL), 128, np.uint8)  # planes Y, U, V below one another
            wide = np.asarray(Image.fromarray(cell).resize((2 * CELL, CELL), Image.Resampling.BICUBIC))
            page[:CELL] = np.round(16 + wide * (219 / 255))
            for _ in range(FPS):
                packets += stream.encode(av.VideoFrame.from_ndarray(page, format="yuv420p"))
        packets += stream.encode(None)
        strip = BitStreamFilterContext("filter_units=remove_types=6", stream)  # x264's 600 bytes of settings
        kept = [out for packet in packets for out in strip.filter(packet)]
        if sound is not None:
            add_sound(container, sound)
        for packet in kept:
            packet.stream = stream
            container.mux(packet)


def write_audio(path: Path, sound: np.ndarray) -> None:
    """float32 [samples] at RATE as Ogg Opus."""
    import av

    with av.open(str(path), "w", container_options={"fflags": "bitexact"}) as container:
        add_sound(container, sound)


def read_image(path: Path) -> np.ndarray:
    """A picture as uint8 [height, width]."""
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("L"))


def read_audio(path: Path) -> np.ndarray:
    """A file's first sound track as float32 [samples] at RATE."""
    import av

    with av.open(str(path)) as container:
        resampler = av.AudioResampler("flt", "mono", RATE)
        frames = [part for frame in container.decode(audio=0) for part in resampler.resample(frame)]
        frames += resampler.resample(None)
    return np.concatenate([frame.to_ndarray()[0] for frame in frames])


def read_video(path: Path) -> np.ndarray:
    """A file's frames as uint8 [frames, height, width]."""
    import av

    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="gray") for frame in container.decode(video=0)])
