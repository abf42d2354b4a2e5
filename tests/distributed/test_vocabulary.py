"""Rows that model.resize_embeddings adds: trained, saved, resumed and exported under any layout as on one rank.

A tied model with multi-token prediction has the embedding three times in a pipeline of two: at its first stage, in the head and
for the tokens ahead.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_tasks
from support.more_tokens import NEW, add_tokens
from support.pool import Pool, PoolError
from support.tiny_qwen35 import write_tiny_qwen35
from support.weights import tensors

RESIZE = "model.resize_embeddings=true"
EMBEDDING = "model.language_model.embed_tokens.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_qwen35(tmp_path_factory.mktemp("vocabulary") / "hf", tied=True, mtp=1)
    assert add_tokens(folder) == 393  # 386 rows are there; two ranks share 394
    return folder


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    turns = [
        [{"role": "user", "content": f"{NEW[n % 9]} {n}"}, {"role": "assistant", "content": f"{n} {NEW[-1 - n % 9]}"}]
        for n in range(24)
    ]
    rows.write_text("".join(json.dumps({"messages": both}) + "\n" for both in turns))
    return [
        *rank_tasks.ADAMW, f"data.train=[{rows}]", "data.eval=[]", "data.augment=0", "train.global_batch=2", "packing.budget=64", "data.lookahead=4",
        "train.lr=1e-2", "train.warmup_steps=0", "train.steps=2", "train.mtp_loss=0.1", "engine.precision=fp32",
    ]  # fmt: skip


def train(pool: Pool, ranks: int, overrides: list[str], *more: str) -> dict[str, Any]:
    return pool.run(ranks, rank_tasks.train, [*overrides, *more], "qwen35_vl_sft", "tiny", timeout=300.0)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [1, 2])
def test_without_the_key_it_is_one_sentence(
    ranks: int, folder: Path, overrides: list[str], pool: Pool, tmp_path: Path
) -> None:
    with pytest.raises(PoolError, match=r"the tokenizer has ids up to 392 .*the embedding has 386 rows"):
        train(pool, ranks, overrides, f"model.init={folder}", f"run.dir={tmp_path}", f"parallel.tp={ranks}")


@pytest.mark.slow
def test_any_layout_trains_them_as_one_rank_does(
    folder: Path, overrides: list[str], pool: Pool, tmp_path: Path
) -> None:
    pool.run(1, rank_tasks.call, "convert", str(folder), str(tmp_path / "own"), timeout=300.0)
    layouts = {
        "one": (1, (f"model.init={folder}",)),
        "tp": (2, (f"model.init={tmp_path / 'own'}", "parallel.tp=2")),
        "pp": (2, (f"model.init={folder}", "parallel.pp=2")),
    }
    found = {
        name: train(pool, ranks, overrides, RESIZE, *keys, f"run.dir={tmp_path / name}")
        for name, (ranks, keys) in layouts.items()
    }
    before = tensors(folder)
    wanted = tensors(tmp_path / "one" / "export")
    new = wanted[EMBEDDING][386:]
    mean = before[EMBEDDING].double().mean(dim=0).float()
    assert len(new) == 7 and ((new - mean).abs().amax(dim=1) > 1e-4).all()
    assert wanted.keys() == before.keys()
    for name in ("tp", "pp"):
        torch.testing.assert_close(found[name]["losses"], found["one"]["losses"], rtol=1e-5, atol=1e-5)
        exported = tensors(tmp_path / name / "export")
        assert exported.keys() == wanted.keys()
        for tensor in wanted:
            # AdamW's first steps are as long for a gradient that is rounding alone
            assert float((exported[tensor] - wanted[tensor]).abs().mean()) < 1e-5, (name, tensor)
    # The checkpoint is converted to what the run exported, and another run goes on from it under another layout.
    pool.run(1, rank_tasks.call, "convert", str(tmp_path / "pp"), str(tmp_path / "again"), timeout=300.0)
    exported = tensors(tmp_path / "pp" / "export")
    for name, tensor in tensors(tmp_path / "again").items():
        torch.testing.assert_close(tensor, exported[name], rtol=0, atol=0)
    train(
        pool,
        2,
        overrides,
        RESIZE,
        f"model.init={folder}",
        "parallel.tp=2",
        "train.steps=3",
        f"run.dir={tmp_path / 'pp'}",
    )
    still = ("train.lr=1e-30", "train.min_lr=0", "train.steps=1")
    train(pool, 1, overrides, f"model.init={tmp_path / 'one'}", *still, f"run.dir={tmp_path / 'further'}")
    further = tensors(tmp_path / "further" / "export")
    for name, tensor in further.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=0)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == 393
    rows = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": NEW[3]}, {"role": "assistant", "content": NEW[8]}]
    rows.write_text(json.dumps({"messages": turns}))
    verify = partial(rank_tasks.call, rows=str(rows), overrides=("packing.budget=64",))
    pair = (str(tmp_path / "one"), str(tmp_path / "one" / "export"))
    assert pool.run(1, verify, "verify", *pair, timeout=300.0)[0]["equal"]
