"""Plant one-line faults in a copy of the repository, one after the other: python scripts/plant_faults.py [FAULT ...] [--limit 120]

For each, `make check` runs in the copy; a table says after how many seconds it failed and at which test. Fails where a fault
is not found within the limit, or where its line has moved.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Fault:
    """`old`, which stands once in the source, becomes `new`."""

    old: str
    new: str

    def path(self, root: Path) -> Path:
        """The file of zoo that holds `old`; raises ValueError where it does not stand there once."""
        texts = {path: path.read_text(encoding="utf-8") for path in (root / "zoo").rglob("*.py")}
        paths = [path for path, text in texts.items() for _ in range(text.count(self.old))]
        if len(paths) != 1:
            raise ValueError(
                f"zoo has {len(paths)} times {self.old!r}, wanted 1: bring scripts/plant_faults.py up to date"
            )
        return paths[0]


FAULTS = {
    "zigzag-split": Fault("offset + (2 * size - 1 - rank) * chunk", "offset + (size + rank) * chunk"),
    "label-mask": Fault("[start:end] = weight", "[start + 1 : end] = weight"),
    "mtp-padding": Fault("exists = (parts.token_index >= depth) & ~parts.padding_mask", "exists = parts.token_index >= 0"),
    "qkv-axis": Fault(
        "grouped = tensor.reshape(dims.kv_heads, ratio + 2, dims.head_dim, *tail)",
        "grouped = tensor.reshape(ratio + 2, dims.kv_heads, dims.head_dim, *tail).transpose(0, 1)",
    ),
    "retention": Fault(" - keep]", " - keep + 1]"),
    "loss-scale": Fault("return world.dp_size * self.batches / (known", "return self.batches / (known"),
    "planner-bytes": Fault("else float(FP32))", "else 2.0)"),
    "key-default": Fault("keep: int = number(2, ", "keep: int = number(3, "),
    "mrope-reset": Fault(
        "positions = _sample(segment[:length], left)",
        "positions = _sample(segment[:length], left) + sum(piece.shape[1] for piece in pieces)",
    ),
    "bin-over-budget": Fault("left = self.budget - opening[0]", "left = self.budget"),
    "tied-export": Fault("return self.tied_to is None or not dims.tied", "return True"),
    "clip-norm": Fault("most / (norm + 1e-6)", "most / (2 * norm + 1e-6)"),
}  # fmt: skip


def copy(folder: Path) -> None:
    """The files of the working tree, as a repository of one commit, with mypy's cache."""

    def git(*arguments: str, where: Path = folder) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", *who, *arguments], cwd=where, check=True, capture_output=True, text=True).stdout

    for name in git("ls-files", "-co", "--exclude-standard", "-z", where=ROOT).split("\0")[:-1]:
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", folder / ".mypy_cache")
    git("init", "-q", "-b", "main")
    git("add", "-A")
    git("commit", "-q", "-m", "A tree without faults")


def check(fault: Fault, folder: Path, *arguments: str) -> tuple[float, list[str], str]:
    """Seconds that the check of a copy with the fault takes, the tests that fail, and what it writes."""
    path = fault.path(folder)
    right = path.read_text(encoding="utf-8")
    path.write_text(right.replace(fault.old, fault.new), encoding="utf-8")
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "scripts/check.py", *arguments],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True,
        )  # fmt: skip
    finally:
        path.write_text(right, encoding="utf-8")
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    return time.monotonic() - began, failed if done.returncode else [], done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"by default all: {', '.join(FAULTS)}")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds")
    options, arguments = parser.parse_known_args()
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy(folder)
        for fault in options.faults or FAULTS:
            seconds, failed, output = check(FAULTS[fault], folder, *arguments)
            late = "" if seconds <= options.limit else f", over {options.limit:.0f} s"
            print(f"{fault:16} {seconds:4.0f} s{late}  {failed[0] if failed else 'NOT FOUND'}", flush=True)
            if not failed:
                print(output)
            missed += not failed or bool(late)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
