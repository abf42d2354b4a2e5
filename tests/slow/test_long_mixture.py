"""Two hundred steps of the tiny Qwen3-Omni on eight ranks, every kind of parallelism at once, against one rank's.

TP2 with SP, PP2, CP2 and EP4; packed rows with images, videos, speech, videos with sound, and text. About nine minutes
on two cores: `python -m pytest -m slow tests/slow/test_long_mixture.py`.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 200
# Relative difference of a step's loss. Rounding differs between the two; as soon as a router's choice hangs on it, the
# runs part slowly, as two runs of one rank do with another number of threads (docs/parallelism.md has the figures).
EARLY, FIRST, ALL, MEAN = 50, 1e-5, 5e-2, 1e-2
COMMON = (
    "recipe=qwen3_omni_sft",
    "size=tiny",
    "hardware=cpu",
    f"train.steps={STEPS}",
    "train.global_batch=2",
    "train.eval_rows=8",
    "train.eval_every=0",
    "train.save_every=0",
    "train.eps=1e-5",  # above the rounding noise of gradients, which Adam would blow up to steps of size lr
    "data.augment=0",
    "packing.budget=768",
    "packing.align=4",  # what the eight ranks need, for both: the rows are the same
    "engine.threads=1",
    "log.tensorboard=false",
    "log.predictions=0",
    "export=false",
)
EIGHT = ("nproc=8", "parallel.tp=2", "parallel.sp=true", "parallel.pp=2", "parallel.cp=2", "parallel.ep=4")


def losses(folder: Path, *overrides: str) -> list[float]:
    """Every step of a run through the command line."""
    command = [sys.executable, "-m", "zoo", "train", *COMMON, f"run.dir={folder}", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=5400)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = map(json.loads, (folder / "train.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "grad_norm" in line]


@pytest.mark.slow(minutes=10)
def test_eight_ranks_take_the_steps_of_one(tmp_path: Path) -> None:
    one, eight = losses(tmp_path / "one", "nproc=1"), losses(tmp_path / "eight", *EIGHT)
    assert len(one) == len(eight) == STEPS
    assert all(map(math.isfinite, eight))
    errors = [abs(a - b) / a for a, b in zip(eight, one, strict=True)]
    print(
        f"loss {one[0]:.4f} to {one[-1]:.4f}; relative difference: first {EARLY} steps {max(errors[:EARLY]):.1e}, "
        f"all {max(errors):.1e}, mean {sum(errors) / STEPS:.1e}"
    )
    assert one[-1] < 0.5 * one[0], "it learns"
    assert max(errors[:EARLY]) < FIRST
    assert max(errors) < ALL
    assert sum(errors) / STEPS < MEAN
