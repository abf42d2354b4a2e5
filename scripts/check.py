"""Ruff, the types, and the tests closest to a change: python scripts/check.py [--base main] [--seconds 80] [arguments of pytest]

The change is what differs from where this branch left `base`, with files that are not committed yet. Fast tests come in
the order of `distances`, the first MOST files of them; none starts after `--seconds`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ("models", "bridges", "recipes")  # imported from zoo, by names that recipes give
FOLDERS = ("zoo", "benchmarks", "models", "bridges", "tests")
TIERS = ("unit", "fuzz", "parity", "distributed", "cli")
MOST = 40  # files of tests; collecting takes a second or two for ten of them
ALWAYS = "tests/unit/test_architecture.py"
DOCS = "tests/unit/test_docs.py"
IMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+import\s+(\([^)]*\)|[^\n]*)|import\s+([\w.]+))", re.MULTILINE)


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split("\0")[:-1] if "-z" in arguments else done.stdout.split()


def changed(base: str) -> list[str]:
    """Files, relative to the root, that differ from the common ancestor with `base`; from HEAD where there is no such branch."""
    ancestor = (git("merge-base", base, "HEAD") or ["HEAD"])[0]
    names = {*git("diff", "--name-only", "-z", ancestor), *git("ls-files", "--others", "--exclude-standard", "-z")}
    return sorted(name for name in names if (ROOT / name).exists())


def module(name: str) -> str:
    """The name under which a file is imported: models/llava/step.py is zoo.models.llava.step."""
    path = f"zoo/{name}" if name.startswith(FAMILIES) else name.removeprefix("tests/")
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(text: str) -> Iterator[str]:
    """Modules, and names in modules, that a program imports anywhere."""
    for source, names, plain in IMPORT.findall(text):
        yield source or plain
        yield from (f"{source}.{name}" for name in re.findall(r"\w+", names))


def mirror(name: str) -> str:
    """The folder of unit tests of a source file: the deepest of its packages that has one."""
    first, _, rest = name.partition("/")
    folder = Path("tests/unit") / (
        Path(rest).parent if first == "zoo" else {"models": "nn", "bridges": "bridge"}.get(first, "config")
    )
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    return f"{folder.as_posix()}/"


def distances(files: Iterable[str], texts: Mapping[str, str]) -> dict[str, int]:
    """How far each file of tests is from a change of `files`, given the texts of all programs; without those out of reach.

    0: changed itself. 1: called after a changed file, its folder or its family, or names a file that is no module of
    zoo. 2: imports it. 3: stands in the folder of its unit tests. n + 2: reaches it by n imports, of which one is from a
    family's tests to its files, whose names stand in recipes alone.
    """
    files = list(files)
    tests = [name for name in texts if Path(name).name.startswith("test_")]
    reached: dict[str, int] = {}

    def put(distance: int, names: Iterable[str]) -> None:
        for name in names:
            reached.setdefault(name, distance)

    def called(name: str) -> set[str]:
        """Tests that are called after a source file, or after the folder or family that it belongs to."""
        if name.startswith(FAMILIES):
            words, folder = [part.partition(".")[0] for part in Path(name).parts[1:]], "tests/"
        else:
            words, folder = [Path(name).stem, Path(name).parent.name], mirror(name)
        starts = tuple(f"test_{word}" for word in words)
        return {test for test in tests if test.startswith(folder) and Path(test).name.startswith(starts)}

    put(0, (name for name in files if name in tests))
    sources = [name for name in files if name.startswith(("zoo/", *FAMILIES))]
    for name in files:
        put(1, called(name) if name in sources else ())
        put(1, [DOCS] if name.endswith(".md") else ())
        if not name.startswith(("zoo/", "models/", "bridges/")):  # nothing imports it, or programs run it too
            put(1, (test for test in tests if Path(name).name in texts[test]))
    importers: dict[str, set[str]] = {}
    for name, text in texts.items():
        for source in imports(text):
            importers.setdefault(source, set()).add(name)
    edge, seen, number = set(files), set(files), 1
    while edge:
        further = (
            importers.get(module(name), set()) | (called(name) if name.startswith(FAMILIES) else set()) for name in edge
        )
        edge = set().union(*further) - seen
        seen |= edge
        put(2 if number == 1 else number + 2, (name for name in edge if name in tests))
        if number == 1:
            folders = {mirror(name) for name in sources} - {"tests/unit/"}
            put(3, (test for test in tests if test.startswith(tuple(folders))))
        number += 1
    return reached


def closest(files: Iterable[str]) -> list[str]:
    """All files of fast tests that a change reaches, the closest first; of equals, those that start no ranks."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    reached = distances(files, texts)

    def order(name: str) -> tuple[int, int, str]:
        return reached[name], TIERS.index(name.split("/")[1]), name

    return sorted((name for name in reached if name.split("/")[1] in TIERS), key=order)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="main")
    parser.add_argument("--seconds", type=float, default=80.0, help="after which no test starts")
    options, arguments = parser.parse_known_args()
    began, started, python = time.monotonic(), time.time(), sys.executable
    files = changed(options.base)
    reached = closest(files)
    selected = list(dict.fromkeys([*reached[:MOST], ALWAYS]))
    print(f"{len(files)} files changed; {len(selected)} of {len(reached)} test files: {' '.join(selected)}", flush=True)
    workers = min(len(os.sched_getaffinity(0)), len(selected))
    spread = ("-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder")
    until = ("--until", f"{started + options.seconds:.0f}")
    types = subprocess.Popen(
        ["sh", "scripts/typecheck.sh", python], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    tests = [python, "-m", "pytest", "-q", "--maxfail=5", "--no-header", *spread, *until, *selected, *arguments]
    codes = {
        "ruff": subprocess.call([python, "-m", "ruff", "check", "."], cwd=ROOT),
        "ruff format": subprocess.call([python, "-m", "ruff", "format", "--check", "."], cwd=ROOT),
        "tests": subprocess.call(tests, cwd=ROOT),
    }
    print(types.communicate()[0], end="")
    codes["types"] = types.returncode
    if codes["tests"] == 5:  # all of them are slow
        codes["tests"] = 0
    failed = [name for name, code in codes.items() if code]
    print(f"{'failed: ' + ', '.join(failed) if failed else 'all is well'}, {time.monotonic() - began:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
