"""data.overlong=shrink in a run: photos that are too large are trained on, and the run says how many."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import rank_tasks
from support.pool import Pool

ROWS = 8


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_says_how_many_rows_it_made_smaller(ranks: int, pool: Pool, tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for number in range(ROWS):
        size = (900, 1200) if number % 2 else (60, 80)
        Image.fromarray(noise.integers(0, 255, (*size, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    rows = [
        {"messages": [{"role": "user", "content": f"<image>{n}?"}, {"role": "assistant", "content": str(n)}], "images": [f"{n}.png"]}
        for n in range(ROWS)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"data.train={tmp_path / 'rows.jsonl'}", "data.eval=none", "data.overlong=shrink", "packing.budget=256",
        "train.steps=3", "train.global_batch=2", "data.lookahead=4", "export=false", "log.tensorboard=false", "train.warmup_steps=0",
        f"run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    results = pool.run(ranks, rank_tasks.train, overrides, "qwen3_vl_sft", timeout=300.0)
    assert all(len(result["losses"]) == 3 for result in results)
    records = [json.loads(line) for line in (tmp_path / "run" / "train.jsonl").read_text().splitlines()]
    counts = [record["count"] for record in records if record.get("event") == "rows_shrunk"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert counts and counts == sorted(set(counts)) and counts[-1] == summary["shrunk_rows"] == ROWS // 2
    assert not summary["skipped_rows"]
