"""A tiny model learns from random weights to find a held-out strip of handwriting by its number in words: 97.1 % after 400 steps.

`python -m pytest -m slow tests/slow/test_learns_embeddings.py`
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow(minutes=12)
def test_strips_are_found_by_words(tmp_path: Path) -> None:
    """70 strips, one of which is right: chance is 1.4 %. The command is that of docs/retrieval.md."""
    rows = '[{path: "digits:train", format: "zoo.data.digits:found_by_words", kinds: [image]}]'
    command = [
        sys.executable, "-m", "zoo", "train", "recipe=qwen3_vl_embed", "size=tiny", "hardware=cpu", "nproc=1", f"run.dir={tmp_path / 'run'}",
        f"data.train={rows}", "train.steps=400", "train.lr=1e-3", "train.eval_every=0", "train.eval_rows=80", "export=false",
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=tmp_path)
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert metrics["recall@1"] >= 0.9, metrics
