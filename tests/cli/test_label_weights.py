"""Weights of rows and messages in a run: weight 3 is the row three times, to rounding."""

from pathlib import Path
from typing import Any

import pytest
from support.commands import Zoo, logged, text_row, write_rows

pytestmark = pytest.mark.slow


def test_a_weighted_row_is_that_row_so_often(zoo: Zoo, tmp_path: Path) -> None:
    heavy, light = text_row(123), text_row(45678)
    answer = {**light["messages"][1], "weight": 1.0}
    no = {"role": "assistant", "content": "no", "weight": 0}
    silent = {"messages": [*text_row(9)["messages"][:1], no, *light["messages"][:1], answer]}
    plain = {"messages": [*silent["messages"][:1], {"role": "assistant", "content": "no"}, *light["messages"]]}
    runs: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
        "weighted": ([{**heavy, "weight": 3}, silent], ["data.labels=assistant"]),
        "repeated": ([heavy, heavy, heavy, plain], []),
    }
    # Under data.labels=last, the first answer of `plain` has no label, and the last ones of the others are all they have.
    runs["repeated"][1].append("data.labels=last")
    metrics = {}
    for name, (rows, overrides) in runs.items():
        data = write_rows(tmp_path / f"{name}.jsonl", rows)
        size = f"train.global_batch={len(rows)}"
        done = zoo.train(
            tmp_path / name, f"data.train={data}", f"data.eval={data}", size, *overrides, "packing.mode=none", "data.shuffle=false",
            "train.steps=3", "export=false", "train.aux_loss=0", "train.z_loss=0", "data.blank_answers=0",
        )  # fmt: skip
        assert done.code == 0, done
        metrics[name] = [(line["loss"], line["grad_norm"]) for line in logged(tmp_path / name)]
    for found, wanted in zip(metrics["weighted"], metrics["repeated"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)
