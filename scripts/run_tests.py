"""Runs the tests: python scripts/run_tests.py fast|all|turn|ci [--workers N] [--turn K] [--minutes M] [arguments of pytest]

    fast   everything but the tests marked `slow`: `make test`
    all    everything, also the slow tests, and those of tests/gpu where there is a GPU: `make test-all`
    turn   piece K of the slow tests, of TURNS: `make test-turn TURN=K`
    ci     `fast`, then piece K, K+1, ... of the slow tests, until M minutes have passed since --start

Tests that start ranks or commands run two at a time, the others in N processes. What fails beside other tests runs once
more, alone: these tests wait for processes and signals, and a full machine can be too slow. The last line sums up.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TURNS = 5
LEAST_MINUTES = 5.0  # for a further piece to begin
GROUPS = (("tests/unit", "tests/parity", "tests/fuzz"), ("tests/cli", "tests/distributed", "tests/slow"))
MANY_CASES = "400"  # of each kind of fuzzing; tests/support/fuzz.py has the number of the fast tier
RANKED = 2  # workers of the second group
EVERY = ("-m", "slow or not slow")
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
ONE_BY_ONE = ("--dist", "worksteal")  # a few long tests, and none that shares a world
KINDS = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warning", "error")


def counts(output: str) -> Counter[str]:
    """The numbers of pytest's summary, which is the last such line of what it wrote."""
    for line in reversed(output.splitlines()):
        if re.search(r"\bin \d+\.\d+s\b", line):
            found = re.findall(rf"(\d+) ({'|'.join(KINDS)})s?\b", line)
            return Counter({kind: int(number) for number, kind in found})
    return Counter()


def summed(total: Mapping[str, int], seconds: float) -> str:
    """A line as pytest's own."""
    parts = [f"{total[kind]} {kind}" for kind in KINDS if total.get(kind) and kind not in ("deselected", "warning")]
    return f"==== {', '.join(parts) or 'no tests ran'} in {seconds:.2f}s ===="


def chosen_turn(environ: Mapping[str, str], root: Path = ROOT) -> tuple[int, str]:
    """The piece that a run of continuous integration begins with, 1 to TURNS, and the reason.

    It follows from a number that grows by one: ZOO_TEST_TURN, the number of the workflow's run, or the number of commits
    of the main line. A shallow clone knows no number of commits; the commit's own hash serves there.
    """
    for name in ("ZOO_TEST_TURN", "GITHUB_RUN_NUMBER"):
        if environ.get(name, "").isdecimal():
            return int(environ[name]) % TURNS + 1, f"{name}={environ[name]}"

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    head = git("rev-parse", "HEAD")
    if git("rev-parse", "--is-shallow-repository") == "true":
        return int(head[:8], 16) % TURNS + 1, f"commit {head[:8]} of a shallow clone"
    number = int(git("rev-list", "--count", "--first-parent", "HEAD"))
    return number % TURNS + 1, f"commit {head[:8]} is number {number}"


def order(first: int) -> list[int]:
    """All pieces, from `first` on."""
    return [(first - 1 + step) % TURNS + 1 for step in range(TURNS)]


class Runs:
    """Runs of pytest one after the other, and the sum of their results."""

    def __init__(self, workers: int, arguments: Sequence[str], until: float | None = None) -> None:
        self.workers, self.arguments, self.until = workers, list(arguments), until
        self.total: Counter[str] = Counter()
        self.began = time.time()
        self.broken = 0  # exit code of the first run that failed
        self.cache = tempfile.TemporaryDirectory()  # which tests failed: of this run alone

    def pytest(self, folders: Sequence[str], *arguments: str) -> tuple[int, Counter[str]]:
        """Exit code and numbers of one run, whose output is shown as it comes."""
        cache = f"cache_dir={self.cache.name}"
        command = [sys.executable, "-m", "pytest", "-o", cache, *folders, *arguments, *self.arguments]
        if self.until is not None and "-m" in arguments:
            command += ["--until", f"{self.until:.0f}"]
        lines = []
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
                lines.append(line)
        return process.returncode, counts("".join(lines))

    def groups(self, *selection: str, ranked: Sequence[str] = BY_FILE) -> None:
        """Both groups of folders, each with one more try for what failed; `ranked` says how the second is spread.

        The first group is spread by file, in order: tests that share a world come last in theirs (tests/conftest.py).
        """
        self.run(GROUPS[0], *selection, spread=("-n", str(self.workers), *BY_FILE))
        self.run(GROUPS[1], *selection, spread=("-n", str(min(RANKED, self.workers)), *ranked))

    def run(self, folders: Sequence[str], *selection: str, spread: Sequence[str] = ()) -> None:
        code, found = self.pytest(folders, *spread, *selection)
        if code == 1:
            print("Once more, alone, what failed:", flush=True)
            again = ("--last-failed", "--last-failed-no-failures", "none")
            # Which cases of a function are slow follows from its other cases, which are not collected here.
            code, second = self.pytest(folders, *again, *selection, *EVERY)
            if code == 5:  # an error without a test of its own
                code = 1
                second = Counter({"error": 1})
            for kind in ("failed", "error"):
                found.pop(kind, None)
            found += Counter({kind: second[kind] for kind in ("failed", "error", "passed")})
        self.total += found
        if code not in (0, 5):  # 5: no test of these folders was asked for
            self.broken = self.broken or code

    def end(self) -> int:
        """Print the sum; the exit code of all."""
        print(summed(self.total, time.time() - self.began), flush=True)
        return self.broken


def turns(runs: Runs, first: int) -> None:
    """The slow tests, piece by piece, while time remains."""
    assert runs.until is not None
    done: list[int] = []
    left = order(first)
    while left and time.time() + 60 * LEAST_MINUTES <= runs.until:
        turn = left.pop(0)
        print(f"\nSlow tests, piece {turn} of {TURNS} (here: make test-turn TURN={turn})", flush=True)
        runs.groups("-m", "slow", "--turn", f"{turn}/{TURNS}", ranked=ONE_BY_ONE)
        done.append(turn)
    print(f"\nPieces of the slow tests that began: {done}. Pieces left to later runs: {left}.")
    for turn in left:
        print(f"  make test-turn TURN={turn}")
    print("Tests that their piece had no time for are listed above as left out.", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fast", "all", "turn", "ci"))
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turn", type=int, choices=range(1, TURNS + 1))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--start", type=float, default=time.time(), help="seconds since 1970")
    options, arguments = parser.parse_known_args()
    if options.what in ("all", "ci"):
        os.environ.setdefault("ZOO_FUZZ_CASES", MANY_CASES)
    runs = Runs(options.workers, arguments)
    if options.what in ("fast", "ci"):
        runs.groups()
    if options.what == "all":
        runs.groups(*EVERY)
        runs.run(["tests/gpu"], *EVERY)
    if options.what == "turn":
        if options.turn is None:
            parser.error("--turn says which piece")
        runs.groups("-m", "slow", "--turn", f"{options.turn}/{TURNS}", ranked=ONE_BY_ONE)
    if options.what == "ci":
        turn, reason = chosen_turn(os.environ)
        print(f"\nThe fast tests are done. The slow ones follow from piece {turn} of {TURNS} on: {reason}.")
        runs.until = options.start + 60 * options.minutes
        turns(runs, turn)
    return runs.end()


if __name__ == "__main__":
    sys.exit(main())
