"""Runs of a talker: each layout takes one rank's steps, a checkpoint goes on under another layout, and exports are the same bytes."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_tasks
from support.commands import write_rows
from support.pool import Pool
from support.tiny_qwen25_talker import write_tiny_qwen25_talker
from support.tiny_talker import CODES, write_tiny_talker
from support.weights import same, tensors

pytestmark = pytest.mark.slow

FOLLOWED = 5e-5
COMMON = (
    *rank_tasks.ADAMW, "train.steps=3", "train.global_batch=4", "train.warmup_steps=0", "train.lr=3e-3", "train.eps=1e-4",
    "train.save_every=2", "train.eval_rows=0", "data.augment=0", "packing.budget=128", "log.tensorboard=false", "log.predictions=0",
    "packing.align=4",  # what sequence parallelism needs, for all: the bins are the same
)  # fmt: skip
# A talker on a thinker that stays as it is, which has experts; a dense pair that learns as a whole; and adapters of both kinds.
TALKER, PAIR, ADAPTERS, ADAPTERS_OF_BOTH = (
    "qwen3_omni_talker_sft", "qwen25_omni_speech_sft", "qwen3_omni_talker_sft_lora", "qwen3_omni_speech_sft_lora",
)  # fmt: skip
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "serial": (1, ()),
    "tp2": (2, ("parallel.tp=2",)),
    "ep2": (2, ("parallel.ep=2",)),
    "pp2": (2, ("parallel.pp=2",)),
    "pp2 tp2": (4, ("parallel.pp=2", "parallel.tp=2")),
}
CASES = [*((TALKER, name) for name in ("tp2", "ep2", "pp2")), (PAIR, "pp2 tp2")]
Train = Callable[..., tuple[Path, list[dict[str, float]]]]


def spoken_rows(folder: Path, codebooks: int) -> Path:
    """Rows of several lengths, each spoken in a frame for each of its answer's characters, and nine more."""
    rows: list[dict[str, Any]] = []
    for number in range(8):
        answer = " ".join("1234567"[: 1 + number % 5])
        draw = torch.Generator().manual_seed(number)
        codes = torch.randint(CODES, (9 + len(answer), codebooks), generator=draw).tolist()
        messages = [{"role": "user", "content": f"Say {number}."}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages, "speech": codes, "speaker": ("Ethan", "Chelsie")[number % 2]})
    return write_rows(folder / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def train(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Runs of a recipe under a layout: the folder, and the steps' numbers. Each is made once, but for what goes on in a `folder`."""
    sizes = {"num_hidden_layers": 4, "mlp_only_layers": [1], "num_experts": 6}
    root = tmp_path_factory.mktemp("runs")

    @cache
    def inputs(family: str) -> tuple[str, ...]:
        folder = root / family
        folder.mkdir()
        if family == "qwen3_omni":
            weights = write_tiny_talker(folder / "weights", predictor={"num_key_value_heads": 2}, **sizes)
        else:
            weights = write_tiny_qwen25_talker(folder / "weights")
        return f"model.init={weights}", f"data.train={spoken_rows(folder, 4 if family == 'qwen3_omni' else 1)}"

    def run(recipe: str, layout: str, folder: Path, *more: str) -> tuple[Path, list[dict[str, float]]]:
        size, parallel = LAYOUTS[layout]
        adapters = ("lora.dropout=0",) if recipe.endswith("lora") else ()
        overrides = [
            *COMMON,
            *inputs("_".join(recipe.split("_")[:2])),
            *adapters,
            *parallel,
            f"run.dir={folder}",
            *more,
        ]
        return folder, pool.run(size, rank_tasks.train, overrides, recipe, "null", timeout=300.0)[0]["steps"]

    made = cache(lambda recipe, layout: run(recipe, layout, root / recipe / layout.replace(" ", "_")))
    return lambda recipe, layout, folder=None, *more: (
        run(recipe, layout, folder, *more) if folder else made(recipe, layout)
    )


def follow(found: dict[str, float], wanted: dict[str, float]) -> None:
    for key in ("loss", "code_loss", "grad_norm"):
        assert found[key] == pytest.approx(wanted[key], rel=FOLLOWED), key


@pytest.mark.parametrize(("recipe", "layout"), [*CASES, (ADAPTERS, "pp2"), (ADAPTERS_OF_BOTH, "pp2")])
def test_steps_and_checkpoints(recipe: str, layout: str, train: Train, tmp_path: Path) -> None:
    _, wanted = train(recipe, "serial")
    _, steps = train(recipe, layout)
    assert wanted[2]["loss"] < 0.99 * wanted[0]["loss"]
    for found, one in zip(steps, wanted, strict=True):
        follow(found, one)
    for saved, then in ((layout, "serial"), ("serial", layout)):
        folder = tmp_path / then
        shutil.copytree(train(recipe, saved)[0] / "checkpoints/iter_2", folder / "checkpoints/iter_2")
        _, (last,) = train(recipe, then, folder)
        follow(last, wanted[2])


@pytest.mark.parametrize(("recipe", "layout"), CASES)
def test_exports_are_one_ranks_byte_for_byte(recipe: str, layout: str, train: Train, tmp_path: Path) -> None:
    """Both of the same trained weights, which a step of no size leaves as they are."""
    start = train(recipe, "serial")[0] / "export"
    still = (f"model.init={start}", "train.steps=1", "train.lr=1e-30", "train.min_lr=0")
    exports = [train(recipe, each, tmp_path / each, *still)[0] / "export" for each in ("serial", layout)]
    same(tensors(exports[1]), tensors(exports[0]))  # each stage has files of its own
    for path in exports[0].iterdir():
        if path.suffix in (".pt", ".json", ".jinja") and "index" not in path.name and path.name != "zoo_files.json":
            assert (exports[1] / path.name).read_bytes() == path.read_bytes(), path.name
