"""Prints the table of docs/install.md: which servers and trainers resolve with zoo into one environment, by the newest packages of today.

python scripts/environment_matrix.py [requirement ...]    needs `uv`; downloads metadata alone, in seconds
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "3.12"
COLUMNS = ("torch", "transformers", "huggingface-hub")
VLLM = "cuda-python>=13"  # of the extra `vllm`
PARTNERS: tuple[tuple[str, ...], ...] = (
    ("vllm==0.33.0", VLLM),
    ("vllm==0.26.0", VLLM),
    ("sglang==0.5.23", VLLM),
    ("trl==1.16.0",),
    ("ms-swift==4.6.0",),
    ("verl==0.9.1",),
    ("vllm==0.33.0", "trl==1.16.0", VLLM),
)


def resolved(requirements: Sequence[str]) -> dict[str, str] | None:
    """Name to version of the packages that zoo and these requirements want together; None where there are no such versions."""
    command = ["uv", "pip", "compile", "-", "--python-version", PYTHON, "--quiet", "--no-header", "--no-annotate"]
    done = subprocess.run(command, cwd=ROOT, input="\n".join([".", *requirements]), capture_output=True, text=True)
    if done.returncode:
        if "No solution found" not in done.stderr:
            sys.exit(done.stderr)
        return None
    return dict(line.split("==", 1) for line in done.stdout.splitlines() if "==" in line)


def row(requirements: Sequence[str]) -> str:
    versions = resolved(requirements)
    cells = [versions[name] for name in COLUMNS] if versions else ["no common versions", *["" for _ in COLUMNS[1:]]]
    names = ", ".join(requirement.replace("==", " ") for requirement in requirements if requirement != VLLM)
    return f"| {names} | {' | '.join(cells)} |"


def main() -> None:
    print(f"| next to zoo | {' | '.join(COLUMNS)} |\n|---{'|---' * len(COLUMNS)}|")
    for requirements in [(name,) for name in sys.argv[1:]] or PARTNERS:
        print(row(requirements), flush=True)


if __name__ == "__main__":
    main()
