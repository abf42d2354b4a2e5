"""A run that is killed at random moments, saves included, and started again by the same command loses and repeats nothing.

The loss curve is that of the run without kills, to the bit; see support/kill_train.py. All hundred kills:
`python -m pytest -m slow tests/distributed/test_kills.py` (half an hour each on two cores).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import rank_tasks


@pytest.mark.parametrize(
    ("ranks", "kills", "steps", "when"),
    [
        (1, 1, 12, "any"),
        pytest.param(1, 5, 30, "any", marks=pytest.mark.slow),
        pytest.param(1, 3, 12, "mid-write", marks=pytest.mark.slow),
        pytest.param(1, 3, 12, "mid-copy", marks=pytest.mark.slow),
        pytest.param(4, 3, 16, "mid-copy", marks=pytest.mark.slow(minutes=7)),
        pytest.param(4, 2, 16, "any", marks=pytest.mark.slow),
        pytest.param(4, 3, 16, "mid-write", marks=pytest.mark.slow(minutes=7)),
        pytest.param(1, 100, 500, "any", marks=pytest.mark.slow(minutes=25)),
        pytest.param(4, 100, 400, "any", marks=pytest.mark.slow(minutes=45)),
        pytest.param(4, 100, 400, "mid-write", marks=pytest.mark.slow(minutes=45)),
    ],
)
def test_killed_at_any_moment_a_run_goes_on_to_the_bit(
    ranks: int, kills: int, steps: int, when: str, tmp_path: Path
) -> None:
    script = Path(rank_tasks.__file__).with_name("kill_train.py")
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path), str(ranks), str(kills), str(steps), when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180 + 90 * kills, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["kills"] == kills and seen["steps"] == steps, seen
    assert seen["steps done again"], seen
    assert when == "any" or seen["in mid-write"] == kills, seen
    assert seen.get("in a save") or kills < 100, seen  # few kills may all miss the saves
