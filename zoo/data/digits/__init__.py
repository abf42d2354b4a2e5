"""The bundled `digits` sample set: handwritten and spoken digits as `messages` rows (see README.md)."""

from pathlib import Path

ROOT = Path(__file__).parent  # holds train.jsonl, heldout.jsonl and media/
