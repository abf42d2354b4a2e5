"""The example of GRPO raises what the model reads right, from rewards alone.

`python -m pytest -m slow tests/slow/test_learns_rewards.py`
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_on_digits.py"


@pytest.mark.slow(minutes=10)
def test_held_out_strips_are_read_better(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, check=True)
    found = re.findall(r"step (\d+): held-out strips ([\d.]+)% right, sampled ([\d.]+)%", done.stdout)
    sampled = [float(share) for _, _, share in found]
    assert [int(step) for step, *_ in found] == [0, 20, 40, 60, 80]
    assert sampled[-1] >= sampled[0] + 8.0, done.stdout
    assert (tmp_path / "runs" / "grpo" / "reinforced" / "checkpoints" / "iter_80").is_dir()
