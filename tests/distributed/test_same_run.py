"""The same seed gives the same run: again, with more threads, on a GPU with run.deterministic; and over which layouts.

On a GPU, all recipes: `python -m pytest -m gpu tests/distributed/test_same_run.py`.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_tasks
from support.pool import Pool
from support.tiny import RECIPES

pytestmark = pytest.mark.slow

COMMON = (
    "train.steps=4", "train.warmup_steps=0", "train.lr=1e-3", "train.eval_rows=2", "data.lookahead=8", "data.augment=0",
    "packing.budget=512", "packing.align=4", "log.tensorboard=false", "log.predictions=0",
)  # fmt: skip


def metrics(run_dir: Path, *names: str) -> list[tuple[Any, ...]]:
    lines = map(json.loads, (run_dir / "train.jsonl").read_text().splitlines())
    return [tuple(line[name] for name in names) for line in lines if "event" not in line]


def weights(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run_dir / "export").glob("*.safetensors"))}


@pytest.fixture
def train(pool: Pool, tmp_path: Path) -> Callable[..., Path]:
    """A run of so many ranks; its folder."""

    def run(name: str, ranks: int, *overrides: str) -> Path:
        folder = tmp_path / name
        pool.run(ranks, rank_tasks.train, [*COMMON, *overrides, f"run.dir={folder}"], timeout=300.0)
        return folder

    return run


EXACT = ("step", "loss", "grad_norm", "lr", "real_tokens", "labels")


@pytest.mark.parametrize("overrides", [("engine.threads=2",), ("train.global_batch=4",)], ids=["threads", "dp2"])
def test_the_same_again(overrides: tuple[str, ...], train: Callable[..., Path]) -> None:
    ranks = 1 if "engine.threads=2" in overrides else 2
    first, second = (train(name, ranks, *overrides) for name in ("first", "second"))
    assert metrics(first, *EXACT) == metrics(second, *EXACT)
    assert weights(first) == weights(second)


OVER_LAYOUTS = {  # ranks, and what both runs have; without clipping, whose norm is summed by rank
    "pp2": (2, ("train.global_batch=4",), ("parallel.pp=2",)),
    "pp2 vpp2": (2, ("train.global_batch=4",), ("parallel.pp=2", "parallel.vpp=2")),
    "dp2": (2, ("train.global_batch=2",), ()),  # two addends have one sum; of more, the order would matter
}


@pytest.mark.parametrize("layout", OVER_LAYOUTS)
def test_over_ranks_where_the_arithmetic_allows(layout: str, train: Callable[..., Path]) -> None:
    from safetensors.torch import load_file

    ranks, common, parallel = OVER_LAYOUTS[layout]
    serial = train("serial", 1, "train.clip_grad=0", *common)
    spread = train("spread", ranks, "train.clip_grad=0", *common, *parallel)
    names = ("step", "loss", "lr", "real_tokens", "labels")
    assert metrics(spread, *names) == metrics(serial, *names)
    found, wanted = (
        {name: tensor for path in (folder / "export").glob("*.safetensors") for name, tensor in load_file(path).items()}
        for folder in (spread, serial)
    )  # fmt: skip
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def test_another_seed_is_another_run(train: Callable[..., Path]) -> None:
    first, second = (train(f"seed{seed}", 1, f"run.seed={seed}") for seed in (1, 2))
    assert metrics(first, "loss") != metrics(second, "loss")


@pytest.mark.gpu
@pytest.mark.parametrize(("recipe", "size"), RECIPES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_on_a_gpu(recipe: str, size: str, ranks: int, tmp_path: Path) -> None:
    """In a process of its own each time, and once resumed from the save in the middle."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    common = [*COMMON, f"size={size}", "train.steps=8", "train.save_every=4", "train.keep=9", f"nproc={ranks}"]
    common += ["run.deterministic=true", f"train.global_batch={4 * ranks}", "parallel.plan=[]"]

    def run(name: str, *more: str) -> Path:
        overrides = [f"recipe={recipe}", *common, f"run.dir={tmp_path / name}", *more]
        command = [sys.executable, "-m", "zoo", "train", *overrides]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        return tmp_path / name

    first, second = run("first"), run("second")
    assert metrics(first, *EXACT) == metrics(second, *EXACT)
    assert weights(first) == weights(second)
    kept = Path("checkpoints", "iter_4")
    shutil.copytree(first / kept, tmp_path / "halves" / kept)
    halves = run("halves")
    assert metrics(halves, *EXACT) == metrics(first, *EXACT)[4:]
    assert weights(halves) == weights(first)
