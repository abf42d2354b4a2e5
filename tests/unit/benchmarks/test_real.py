"""benchmarks/real.sh and the files that media_rows.py draws for it: parts run for real on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zoo.data.media.decode import load_audio, load_image, load_video

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def real(folder: Path, *words: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """The script, with its results in a folder."""
    env = {**os.environ, "PYTHON": sys.executable, "OUT": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(BENCHMARKS / "real.sh"), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds, check=False)


def draw(*words: str) -> subprocess.CompletedProcess[str]:
    """media_rows.py with these arguments."""
    command = [sys.executable, str(BENCHMARKS / "media_rows.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_parts_are_named(tmp_path: Path) -> None:
    done = real(tmp_path, "everything")
    assert done.returncode == 2 and "benchmarks/real.sh whole RECIPE SIZE " in done.stdout
    done = real(tmp_path, "adapters", "qwen3_vl_moe_lora", "--dry-run")
    assert done.returncode and "a size is wanted" in done.stderr
    done = draw(str(tmp_path), "songs=3")
    assert done.returncode == 2 and "pages=600 videos=40 clips=100" in done.stderr


def test_the_same_numbers_give_the_same_files(tmp_path: Path) -> None:
    """The files have the formats and sizes that media_rows.py promises, and no row is in both rows.jsonl and held.jsonl."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        assert draw(str(folder), "pages=2", "videos=1", "clips=2").stdout == f"5 rows in {folder}\n"
    names = {path.name for path in first.iterdir()}
    assert names == {"page_0.jpg", "page_1.jpg", "video_0.mp4", "clip_0.flac", "clip_1.mp3", "rows.jsonl", "held.jsonl"}  # fmt: skip
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names - {"video_0.mp4"})
    rows, held = ((first / name).read_text().splitlines() for name in ("rows.jsonl", "held.jsonl"))
    assert (len(rows), len(held)) == (4, 1) and not set(rows) & set(held)
    media = [json.loads(line)["messages"][0]["content"][0] for line in rows + held]
    assert sorted(medium["type"] for medium in media) == ["audio", "audio", "image", "image", "video"]
    assert min(load_image(first / "page_0.jpg").size) >= 640
    frames, _ = load_video(first / "video_0.mp4", 2.0, 8)
    assert frames.shape[1:] == (3, 720, 1280)
    assert len(load_audio(first / "clip_1.mp3", 16_000)) >= 3 * 16_000


@pytest.mark.slow(minutes=1)
def test_a_whole_model_is_trained_until_it_is_killed_and_goes_on_from_its_save(tmp_path: Path) -> None:
    model = "qwen3_vl_moe_sft", "tiny-moe", "--dry-run"
    done = real(tmp_path, "whole", *model, "train.save_every=2", seconds=300)
    assert done.returncode == 0, done.stderr
    found = _events(done)
    assert {"startup", "memory", "eval", "save"} == {line["event"] for line in found[:-1]}
    assert found[-1]["step"] >= 3
    before = [json.loads(line) for line in (tmp_path / "whole-qwen3_vl_moe_sft/train.jsonl").open()]
    done = real(tmp_path, "resume", *model, seconds=300)
    assert done.returncode == 0, done.stderr
    resumed, startup, step = _events(done)
    saved = resumed["step"]
    assert (resumed["event"], startup["event"], step["step"]) == ("resume", "startup", saved + 1)
    losses = [line["loss"] for line in before if line.get("step") == saved + 1 and "grad_norm" in line]
    assert saved % 2 == 0 and [step["loss"]] == pytest.approx(losses[:1] or [step["loss"]])


def _events(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
