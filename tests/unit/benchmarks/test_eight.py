"""benchmarks/eight.sh and its tables: refused on fewer GPUs, run for real on eight processes of the CPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import eight_tables

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def eight(folder: Path, *words: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """The script, with its results in a folder."""
    env = {**os.environ, "PYTHON": sys.executable, "OUT": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(BENCHMARKS / "eight.sh"), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds, check=False)


def test_fewer_gpus_are_refused_and_parts_are_named(tmp_path: Path) -> None:
    done = eight(tmp_path, "scaling")
    assert done.returncode == 2 and "eight GPUs in one node are wanted, and 0 are here" in done.stderr
    done = eight(tmp_path, "everything")
    assert done.returncode == 2 and "benchmarks/eight.sh layouts " in done.stdout


def test_rates_and_differences_of_results(tmp_path: Path) -> None:
    line = {"way": "row", "ms": 500.0, "mfu": 0.4, "peak_gib": 90.0, "host_gib": 6.0}
    for name, ranks, rate in (("scaling-1", 1, 1000.0), ("scaling-8", 8, 7600.0)):
        found = {"lines": [{**line, "ranks": ranks, "real_tokens_per_s": rate}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    shown = eight_tables.scaling(tmp_path).splitlines()
    assert shown[-1] == "| DP 8 | 500.0 | 950 | 40.0% | 90.0 | 95.0% |"
    assert eight_tables.furthest([7.0, 6.0, 5.0], [7.0, 6.25, 5.125]) == "2.5e-01 of 6.00"
    (tmp_path / "receipts-4.json").write_text(json.dumps({"lines": [{"way": "padded", "failed": "exit code 1"}]}))
    assert eight_tables.receipts(tmp_path).splitlines()[4].endswith("| padded | out of memory |" + " did not run |" * 4)


@pytest.mark.slow(minutes=8)
def test_a_part_runs_on_eight_processes(tmp_path: Path) -> None:
    """Other layouts of eight ranks train alike: the losses of twelve steps are those of DP 8."""
    done = eight(tmp_path, "layouts", "--dry-run", seconds=1500)
    assert done.returncode == 0, done.stderr
    losses = [
        json.loads((tmp_path / f"layouts-{name}.json").read_text())["lines"][0]["losses"]
        for name in ("dp8", "tp2-cp2-dp2")
    ]
    assert len(losses[0]) == len(losses[1]) >= 12 and losses[0] == pytest.approx(losses[1], abs=2e-4)
    row = next(line for line in done.stdout.splitlines() if "TP 2 x CP 2 x DP 2" in line)
    apart = row.split("|")[-2].strip()  # of losses in four places, so it may be nothing
    assert re.fullmatch(r"\d\.\de[+-]\d\d of \d\.\d\d", apart) and "not measured" not in row, row
