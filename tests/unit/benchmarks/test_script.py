"""The scripts of benchmarks/ as commands: `python -m benchmarks.NAME key=value`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import packing, script, soak
from benchmarks.packing_report import PackingOptions, as_dict, table

REPO = Path(__file__).parents[3]
SMALL = ("samples=3", "shortest=4", "longest=9", "repeats=1")


def test_a_script_runs_from_a_clone() -> None:
    command = [sys.executable, "-m", "benchmarks.packing", *SMALL, "cp=8", "--json"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(done.stdout)["cases"]
    assert case["align"] == 16 and case["together"]["bytes_ratio"] > 0


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("sample=4", "sample: no such key; nearest: samples"),
        ("cp=two", "cp=two: integers wanted"),
        ("parallel.cp=2", "parallel.cp: no such key"),
        ("repeats=0", "repeats=0: wanted a whole number from 1 to 1,000,000"),
    ],
)
def test_mistakes_are_one_line(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = script.main(packing.__doc__, PackingOptions, packing.run, table, as_dict, arguments=[argument])
    shown = capsys.readouterr().err
    assert code == 2 and shown.startswith(message) and shown.count("\n") == 1


def test_help_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, shown in (
        (SMALL, "3 samples of 4 to 9 tokens"),
        (["--help"], "how many samples, and their lengths"),
    ):
        assert script.main(packing.__doc__, PackingOptions, packing.run, table, as_dict, arguments=arguments) == 0
        assert shown in capsys.readouterr().out


def test_keys_of_the_recipe_are_handed_on() -> None:
    given: list[object] = []
    script.main(
        None, soak.SoakOptions, lambda *both: given.extend(both), str, takes_recipe_keys=True,
        arguments=["steps=200", "model.arch.depth=1"],
    )  # fmt: skip
    assert given == [soak.SoakOptions(steps=200), ["model.arch.depth=1"]]
