"""Ruff, the types, and the fast tests that a change touches: python scripts/check.py [--base main] [arguments of pytest]

The change is what differs from where this branch left `base`, with files that are not committed yet. It touches a test file
that is part of it, and the unit tests that import a changed module or stand where the module's own tests stand.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAPPED = {"models": "zoo/models", "bridges": "zoo/bridges", "recipes": "zoo/recipes"}
ALWAYS = ("tests/unit/test_architecture.py",)
DOCS = ("tests/unit/test_docs.py",)


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1] if "-z" in arguments else done.stdout.split()


def changed(base: str) -> list[str]:
    """Files, relative to the root, that differ from the common ancestor with `base`."""
    (ancestor,) = git("merge-base", base, "HEAD")
    found = {*git("diff", "--name-only", "-z", ancestor), *git("ls-files", "--others", "--exclude-standard", "-z")}
    return sorted(name for name in found if (ROOT / name).exists())


def module(name: str) -> str:
    """The name under which a source file is imported: models/llava/step.py is zoo.models.llava.step."""
    first, _, rest = name.partition("/")
    path = f"{MAPPED.get(first, first)}/{rest}"
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: Path) -> set[str]:
    """Modules, and names in modules, that a file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def touched(files: Iterable[str], tests: Iterable[Path]) -> list[str]:
    """Test files that a change of `files` touches, of `tests`, relative to the root."""
    files = list(files)
    found = {name for name in files if name.startswith("tests/") and Path(name).name.startswith("test_")}
    sources = [name for name in files if name.endswith(".py") and not name.startswith("tests/")]
    modules = {module(name) for name in sources} | {
        f"support.{Path(name).stem}" for name in files if name.startswith("tests/support/")
    }
    mirrored = {f"{Path(name).parent}/test_{Path(name).stem}.py".replace("zoo/", "tests/unit/", 1) for name in sources}
    for path in tests:
        name = path.relative_to(ROOT).as_posix()
        if name in mirrored or modules & imports(path):
            found.add(name)
    if any(name.endswith(".md") for name in files):
        found |= set(DOCS)
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="main")
    options, arguments = parser.parse_known_args()
    files = changed(options.base)
    selected = [*touched(files, (ROOT / "tests" / "unit").rglob("test_*.py")), *ALWAYS]
    began, python = time.monotonic(), sys.executable
    print(f"{len(files)} files changed; tests: {' '.join(selected)}", flush=True)
    types = subprocess.Popen(
        ["sh", "scripts/typecheck.sh", python], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    codes = {
        "ruff": subprocess.call([python, "-m", "ruff", "check", "."], cwd=ROOT),
        "ruff format": subprocess.call([python, "-m", "ruff", "format", "--check", "."], cwd=ROOT),
        "tests": subprocess.call([python, "-m", "pytest", "-q", *dict.fromkeys(selected), *arguments], cwd=ROOT),
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
