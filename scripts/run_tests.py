"""Runs the tests: python scripts/run_tests.py fast|real|all|ci [--workers N] [--minutes M] [arguments of pytest]

    fast   everything but the tests marked `slow`: `make test`
    real   what holds zoo to published checkpoints, tokenizers and weights, which it finds or fetches: `make test-real`
    all    everything, also the slow tests, and those of tests/gpu where there is a GPU: `make test-all`
    ci     `fast`, then slow tests until M minutes have passed since --start, from another file on in each run

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
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = (5**0.5 - 1) / 2
GROUPS = (("tests/unit", "tests/parity", "tests/fuzz"), ("tests/cli", "tests/distributed", "tests/slow", "tests/real"))
MANY_CASES = "400"  # of each kind of fuzzing; tests/support/fuzz.py has the number of the fast tier
RANKED = 2  # workers of the second group
EVERY = ("-m", "slow or not slow")
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
KINDS = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warning", "error")


def counts(output: str) -> Counter[str]:
    """The numbers of pytest's summary, which is the last such line of what it wrote."""
    for line in reversed(output.splitlines()):
        if re.search(r"\bin \d+\.\d+s\b", line):
            numbers = re.findall(rf"(\d+) ({'|'.join(KINDS)})s?\b", line)
            return Counter({kind: int(number) for number, kind in numbers})
    return Counter()


def summed(total: Mapping[str, int], seconds: float) -> str:
    """A line as pytest's own."""
    parts = [f"{total[kind]} {kind}" for kind in KINDS if total.get(kind) and kind not in ("deselected", "warning")]
    return f"==== {', '.join(parts) or 'no tests ran'} in {seconds:.2f}s ===="


def run_number(environ: Mapping[str, str], root: Path = ROOT) -> tuple[int, str]:
    """A number that grows by one from run to run, and where it is from.

    It is ZOO_TEST_TURN, the number of the workflow's run, or the number of commits of the main line. A shallow clone does
    not know that one; the commit's own hash serves there.
    """
    for name in ("ZOO_TEST_TURN", "GITHUB_RUN_NUMBER"):
        if environ.get(name, "").isdecimal():
            return int(environ[name]), f"{name}={environ[name]}"

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    head = git("rev-parse", "HEAD")
    if git("rev-parse", "--is-shallow-repository") == "true":
        return int(head[:8], 16), f"commit {head[:8]} of a shallow clone"
    number = int(git("rev-list", "--count", "--first-parent", "HEAD"))
    return number, f"commit {head[:8]} is number {number}"


def rotated(files: Sequence[str], number: int) -> list[str]:
    """All files, shuffled once and for all, beginning at a place that depends on the run's number.

    Successive multiples of the golden ratio spread evenly: of n runs in a row, each begins in another n-th of the files.
    """
    shuffled = sorted(files, key=lambda name: zlib.crc32(name.encode()))
    first = int(number * GOLDEN % 1 * len(files))
    return shuffled[first:] + shuffled[:first]


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

    def groups(self, *selection: str) -> None:
        """Both groups of folders, each with one more try for what failed."""
        self.run(GROUPS[0], *selection, spread=("-n", str(self.workers), *BY_FILE))
        self.run(GROUPS[1], *selection, spread=("-n", str(min(RANKED, self.workers)), *BY_FILE))

    def slow(self, number: int) -> None:
        """The slow tests, file by file, while time remains."""
        files = [path for folders in GROUPS for folder in folders for path in (ROOT / folder).rglob("test_*.py")]
        names = rotated([path.relative_to(ROOT).as_posix() for path in files], number)
        print(f"\nSlow tests, from {names[0]} on", flush=True)
        self.run(names, "-m", "slow", spread=("-n", str(min(RANKED, self.workers)), *BY_FILE))

    def run(self, folders: Sequence[str], *selection: str, spread: Sequence[str] = ()) -> None:
        code, first = self.pytest(folders, *spread, *selection)
        if code == 1:
            print("Once more, alone, what failed:", flush=True)
            again = ("--last-failed", "--last-failed-no-failures", "none")
            # Which cases of a function are slow follows from its other cases, which are not collected here.
            code, second = self.pytest(folders, *again, *selection, *EVERY)
            if code == 5:  # an error without a test of its own
                code = 1
                second = Counter({"error": 1})
            for kind in ("failed", "error"):
                first.pop(kind, None)
            first += Counter({kind: second[kind] for kind in ("failed", "error", "passed")})
        self.total += first
        if code not in (0, 5):  # 5: no test of these folders was asked for
            self.broken = self.broken or code

    def end(self) -> int:
        """Print the sum; the exit code of all."""
        print(summed(self.total, time.time() - self.began), flush=True)
        return self.broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fast", "real", "all", "ci"))
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--start", type=float, default=time.time(), help="seconds since 1970")
    options, arguments = parser.parse_known_args()
    if options.what in ("all", "ci"):
        os.environ.setdefault("ZOO_FUZZ_CASES", MANY_CASES)
    runs = Runs(options.workers, arguments)
    if options.what in ("fast", "ci"):
        runs.groups()
    if options.what == "real":
        runs.run(["tests/real"], *EVERY)
    if options.what == "all":
        runs.groups(*EVERY)
        runs.run(["tests/gpu"], *EVERY)
    if options.what == "ci":
        number, reason = run_number(os.environ)
        print(f"\nThe fast tests are done. Where the slow ones begin follows from {reason}.")
        runs.until = options.start + 60 * options.minutes
        runs.slow(number)
    return runs.end()


if __name__ == "__main__":
    sys.exit(main())
