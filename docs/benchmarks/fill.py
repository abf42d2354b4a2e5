"""Fills docs/benchmarks.md: tables and pictures of the result files in this folder. `python docs/benchmarks/fill.py`."""

from pathlib import Path

from zoo.bench.plot import fill

HERE = Path(__file__).parent

if __name__ == "__main__":
    fill(HERE.parent / "benchmarks.md", sorted(HERE.glob("*.json")), HERE.parent / "images")
