"""Small media files and rows, and the processor of a tiny Qwen3-Omni."""

import json
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from PIL import Image
from support.tiny_omni import PROCESSOR_ARCH

from zoo.models.qwen3_omni.processor import build_processor

ROWS = {
    "text": {"messages": [("system", "Be brief."), ("user", "Say 12."), ("assistant", "12")]},
    "turns": {"messages": [("user", "Say 1."), ("assistant", "1"), ("user", "assistant\nno"), ("assistant", "\n2 3")]},
    "image": {"messages": [("user", "<image>Read."), ("assistant", "7")], "images": ["a.png"]},
    "multi_image": {"messages": [("user", "<image> and <image>"), ("assistant", "7 8")], "images": ["a.png", "b.png"]},
    "audio": {"messages": [("user", "Hear <audio>and <audio>"), ("assistant", "3")], "audios": ["a.wav", "b.flac"]},
    "video": {"messages": [("user", "<video>Watch."), ("assistant", "45")], "video": "silent.mp4"},
    "audio_in_video": {
        "messages": [("user", "<audio><video>Both."), ("assistant", "6 7")],
        "audio": "a.wav",
        "videos": ["spoken.mp4"],
        "use_audio_in_video": True,
    },
}


def tone(seconds: float, rate: int = 16000, pitch: float = 440.0) -> np.ndarray:
    """(N,) float32 sine."""
    return (0.5 * np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def encoded_sound(stream, sound: np.ndarray, rate: int, layout: str = "mono") -> list:
    """Packets of (N,) float32 samples."""
    channels = {"mono": 1, "stereo": 2}[layout]
    samples = np.repeat(np.round(sound * 32767).astype(np.int16), channels)[None]
    frame = av.AudioFrame.from_ndarray(samples, format="s16", layout=layout)
    frame.sample_rate = rate
    size = stream.frame_size or 0
    resampler = av.AudioResampler(format=stream.format, layout=layout, rate=rate, frame_size=size)
    parts = [part for part in [*resampler.resample(frame), *resampler.resample(None)] if part is not None]
    return [packet for part in [*parts, None] for packet in stream.encode(part)]


def write_audio(path: Path, sound: np.ndarray, codec: str = "pcm_s16le", rate: int = 16000, layout: str = "mono"):
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        container.mux(encoded_sound(stream, sound, rate, layout))


def write_video(path: Path, greys: list[int], fps: int, sound: np.ndarray | None = None, side: int = 32) -> None:
    """A frame of one grey level for each of `greys`."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "10"})
        stream.width, stream.height, stream.pix_fmt = 2 * side, side, "yuv420p"
        track = None if sound is None else container.add_stream("aac", rate=16000, layout="mono")
        for grey in greys:
            pixels = np.full((side, 2 * side, 3), grey, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
        if track is not None and sound is not None:
            container.mux(encoded_sound(track, sound, 16000))


def write_rows(path: Path, items: list[dict]) -> Path:
    """JSONL with messages given as (role, content) pairs."""
    lines = []
    for item in items:
        messages = [{"role": role, "content": content} for role, content in item["messages"]]
        lines.append(json.dumps({**item, "messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="session")
def media(tmp_path_factory) -> Path:
    """A folder of media files and rows.jsonl, one row of each kind in ROWS."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("media")
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    Image.fromarray(noise).save(root / "a.png")
    Image.fromarray(noise[:32, :64]).save(root / "b.png")
    write_audio(root / "a.wav", tone(1.3))
    write_audio(root / "b.flac", tone(0.7, pitch=300), codec="flac")
    write_video(root / "silent.mp4", [10, 60, 120, 200], fps=2)
    write_video(root / "spoken.mp4", [10, 60, 120, 200, 250, 30], fps=2, sound=tone(3.0))
    write_rows(root / "rows.jsonl", [{"kind": kind, **item} for kind, item in ROWS.items()])
    return root


@pytest.fixture(scope="session")
def processor():
    return build_processor(PROCESSOR_ARCH)


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """The writers of this file."""
    return SimpleNamespace(tone=tone, audio=write_audio, video=write_video, rows=write_rows)


@pytest.fixture(scope="session")
def arch() -> dict:
    """What the processor needs of a tiny Qwen3-Omni's config."""
    return PROCESSOR_ARCH
