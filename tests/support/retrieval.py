"""Rows of retrieval made of the digits: numbers in words, and the media that show them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from zoo.data.digits import ROOT, found_by_words


def write_rows(file: Path, count: int, kinds: Sequence[str]) -> list[str]:
    """So many rows of each kind, every second one with two hard negatives; overrides that train and evaluate on them."""
    items = [json.loads(line) for line in (ROOT / "train.jsonl").read_text().splitlines()]
    rows = []
    for kind in kinds:
        found = [found_by_words(item) for item in items if item["kind"] == kind]
        for number, row in enumerate(found[:count]):
            more = {"negatives": [found[number + count]["positive"], "some text, in the place of it"]}
            rows.append({**row, **(more if number % 2 else {"instruction": "Find the digits"})})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.train=[{file}]", f"data.eval=[{file}]", f"data.root={ROOT}", "data.augment=0", "train.loss=embed"]
