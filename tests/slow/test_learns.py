"""The main recipe learns what it is for. Twelve minutes on two cores: `make test PYTEST_ARGS="-m slow tests/slow"`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MINUTES = 12.0


@pytest.mark.slow
def test_qwen3_omni_reads_held_out_strips_and_hears_unknown_voices(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zoo", "train", "recipe=qwen3_omni_sft", "size=tiny", "hardware=cpu"]
    subprocess.run([*command, f"run.dir={tmp_path}/run"], check=True, cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    match = {kind: figures["exact_match"] for kind, figures in summary["metrics"]["by_kind"].items()}
    assert match["image"] >= 0.95 and match["audio"] >= 0.95, match
    assert summary["seconds"] <= 60 * MINUTES
    steps = [json.loads(line) for line in (tmp_path / "run" / "train.jsonl").read_text().splitlines()]
    assert all(record["pad_fraction"] < 0.05 for record in steps if "pad_fraction" in record)
