"""megatron-core's flex dispatcher in the place of zoo's exchange, with a stand-in for DeepEP."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FAKES = Path(__file__).parents[1] / "support" / "fakes"


def run(folder: Path, calls: Path, *overrides: str) -> list[tuple[float, float]]:
    """Loss and norm of the gradients of each of three steps."""
    sizes = ("recipe=qwen3_vl_moe_sft", "size=tiny-moe", "train.steps=3", "train.global_batch=4", "train.eval_every=0")
    environment = {"PYTHONPATH": str(FAKES), "DEEP_EP_CALLS": str(calls), "TORCHDYNAMO_DISABLE": "1"}
    subprocess.run(
        [sys.executable, "-P", "-m", "zoo", "train", *sizes, "export=false", f"run.dir={folder}", *overrides],
        env=os.environ | environment,
        capture_output=True,
        check=True,
        timeout=240,
    )
    lines: list[dict[str, Any]] = [*map(json.loads, (folder / "train.jsonl").read_text().splitlines())]
    return [(line["loss"], line["grad_norm"]) for line in lines if "event" not in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("nproc=2", "parallel.ep=2"),
        ("nproc=2", "parallel.tp=2", "parallel.ep=2"),
        ("nproc=2", "parallel.cp=2", "parallel.ep=2"),
        ("nproc=4", "parallel.tp=2", "parallel.ep=2", "parallel.etp=2"),
    ],
    ids=" ".join,
)
def test_steps_are_those_of_zoo_s_exchange(layout: tuple[str, ...], tmp_path: Path) -> None:
    counts = []
    wanted = run(tmp_path / "zoo", tmp_path / "none", *layout)
    assert not (tmp_path / "none").exists() and len(wanted) == 3
    for recompute in ("none", "selective"):
        calls = tmp_path / f"calls-{recompute}"
        found = run(tmp_path / recompute, calls, *layout, "parallel.dispatch=deepep", f"engine.recompute={recompute}")
        assert found == [pytest.approx(one, rel=1e-6) for one in wanted]
        counts.append(len(calls.read_text().splitlines()))
    assert counts[0] == counts[1], "recomputed experts need no other exchange"
