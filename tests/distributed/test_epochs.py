"""A run of epochs, whose last step has too few packed rows for all ranks, is that of one rank: steps, loss, weights; also when it is resumed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_tasks
from support.matrix import MODELS
from support.pool import Pool
from support.preference import write_labelled, write_pairs
from support.weights import tensors

from zoo.data.digits import ROOT

COMMON = (
    "train.epochs=1", "train.global_batch=4", "train.warmup_steps=1", "train.lr=1e-3", "train.schedule=linear", "train.clip_grad=0",
    "data.augment=0", "data.lookahead=8", "data.eval=none", "packing.align=8",
    "log.tensorboard=false", "log.predictions=0", *rank_tasks.ADAMW,
)  # fmt: skip
PADDED = ("packing.mode=none", "train.micro_batch=1")
CASES: dict[str, tuple[int, str, tuple[str, ...]]] = {  # ranks, model, overrides
    "packed": (2, "dense", ()),
    "kto": (2, "dense", ("train.loss=kto",)),
    "padded": (2, "dense", PADDED),
    "dpo": (2, "dense", ("train.loss=dpo",)),
    "reward": (2, "dense", ("train.loss=reward",)),
    "experts": (2, "moe", ("parallel.ep=2", "train.aux_loss=0")),
    "four ranks": (4, "dense", ()),
    "pp2 vpp2": (2, "dense", ("parallel.pp=2", "parallel.vpp=2")),
    "pp2 dp2": (4, "dense", ("parallel.pp=2", *PADDED)),
}
FAST = ("packed", "kto")
ROWS = 9
BUDGETS = {"kto": 88, "dpo": 176, "reward": 176}  # so that there are 5 packed rows in two steps; else 32: 9 in three


def write_rows(file: Path, count: int) -> tuple[str, ...]:
    lines = (ROOT / "heldout.jsonl").read_text().splitlines()
    chosen = [line for line in lines if json.loads(line)["kind"] in ("image", "text")][:count]
    file.write_text("".join(f"{line}\n" for line in chosen))
    return (f"data.train=[{file}]", f"data.root={ROOT}")


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "train.jsonl").read_text().splitlines())
    return [line for line in lines if "grad_norm" in line]


@pytest.fixture
def train(pool: Pool, tmp_path: Path) -> Callable[..., Path]:
    def run(name: str, ranks: int, model: str, *overrides: str) -> Path:
        chosen, source = MODELS[model], tmp_path / "model"
        if not source.exists():
            chosen.write(source)
        write = write_labelled if "train.loss=kto" in overrides else write_pairs
        loss = next((one.removeprefix("train.loss=") for one in overrides if one.startswith("train.loss=")), "")
        data = (write if loss else write_rows)(tmp_path / "rows.jsonl", ROWS)
        given = [
            f"packing.budget={BUDGETS.get(loss, 32)}",
            *data,
            *COMMON,
            *chosen.overrides,
            f"model.init={source}",
            *overrides,
            f"run.dir={tmp_path / name}",
        ]
        pool.run(ranks, rank_tasks.train, given, chosen.recipe, "tiny", timeout=300.0)
        return tmp_path / name

    return run


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in CASES])
def test_a_short_last_step_is_that_of_one_rank(name: str, train: Callable[..., Path]) -> None:
    ranks, model, overrides = CASES[name]
    layout = tuple(one for one in overrides if one.startswith("parallel."))
    plain = tuple(one for one in overrides if one not in layout)
    alone, spread = train("alone", 1, model, *plain), train("spread", ranks, model, *overrides)
    wanted, found = steps_of(alone), steps_of(spread)
    assert len(found) == len(wanted) >= 2 and wanted[-1]["real_tokens"] < 0.5 * wanted[0]["real_tokens"]
    for one, other in zip(found, wanted, strict=True):
        for key in ("step", "lr", "real_tokens", "labels"):
            assert one[key] == other[key], key
        for key in ("loss", "grad_norm", "kl", "rewards/margins", "pairs", "answers"):
            if key in other:
                assert one[key] == pytest.approx(other[key], rel=2e-4, abs=2e-5), key
    weights, others = tensors(spread / "export"), tensors(alone / "export")
    for tensor, want in others.items():
        assert torch.allclose(weights[tensor].float(), want.float(), atol=2e-5), tensor


def test_a_run_whose_length_is_estimated_resumes_alike(train: Callable[..., Path], tmp_path: Path) -> None:
    """Random changes give rows other lengths in later epochs: the estimate, and the rate that follows it, are in the checkpoint."""
    overrides = ("train.epochs=3", "data.augment=0.5", "train.save_every=2", "train.keep=9", "packing.budget=64")
    whole = train("whole", 1, "dense", *overrides)
    events = [line for line in map(json.loads, (whole / "train.jsonl").read_text().splitlines()) if "event" in line]
    steps = steps_of(whole)
    totals = [event["total_steps"] for event in events if "total_steps" in event]
    assert totals[-1] == len(steps) == json.loads((whole / "summary.json").read_text())["total_steps"]
    shutil.copytree(whole, tmp_path / "cut")
    for folder in (tmp_path / "cut" / "checkpoints").iterdir():
        if int(folder.name.removeprefix("iter_")) > 2:
            shutil.rmtree(folder)
    cut = steps_of(train("cut", 1, "dense", *overrides))
    for key in ("step", "loss", "lr", "real_tokens"):
        assert [line[key] for line in cut] == [line[key] for line in steps], key
    assert len({line["lr"] for line in steps[1:]}) == len(steps) - 1 > 2
