"""A checkpoint of weights alone is read once, and bf16 weights go on as they are."""

from pathlib import Path
from typing import Any

import pytest

import zoo
from zoo.checkpoint.storage.disk import Files
from zoo.cli.main import main

KEYS = [
    "recipe=qwen3_vl_sft", "size=tiny", "hardware=cpu", "nproc=1", "engine.precision=bf16", "train.optimizer=adamw", "train.global_batch=2",
    "train.save=weights", "train.warmup_steps=0", "data.eval=none", "export=false", "log.tensorboard=false", "log.predictions=0",
]  # fmt: skip


def test_bf16_weights_are_read_once_and_nothing_is_added_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert main(["train", *KEYS, "train.steps=1", f"run.dir={run}"]) == 0
    before, read = run / "checkpoints" / "iter_1", []
    block = Files.block

    def counted(self: Files, name: str, number: int, size: int, buffer: Any) -> memoryview:
        read.append(size)
        return block(self, name, number, size, buffer)

    monkeypatch.setattr(Files, "block", counted)
    changes = "run.accept_changes=[train.lr,train.min_lr,train.steps]"
    more = ["train.steps=2", "train.lr=1e-30", "train.min_lr=0", changes]
    first = zoo.convert(before, tmp_path / "first", quiet=True)
    read.clear()
    assert main(["train", *KEYS, *more, f"run.dir={run}", "train.keep=2"]) == 0
    stored = sum(file.stat().st_size for file in before.glob("rank*.bin"))
    assert sum(read) == 2 * stored, "one block: for the weights, and for the random state in it"
    found = zoo.verify(run / "checkpoints" / "iter_2", first)
    moved = [one for one in found.tensors if one.max_difference is None or one.max_difference > 1e-25]
    assert not moved, "by more than the update's 1e-30"
