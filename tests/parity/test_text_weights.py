"""Weights of families of text in and out again, bit for bit, in the hub's layout whatever layout they came in."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Zoo
from support.tiny import load_plain, rewrite
from support.tiny_gemma3 import write_tiny_gemma3_text
from support.tiny_qwen3 import tiny_config, write_tiny_qwen3
from support.tiny_qwen3_next import write_tiny_qwen3_next
from support.tiny_qwen35 import published as stacked
from support.weights import differences, export, tensors
from torch import Tensor

from zoo.bridge import BridgeError

WITH, WITHOUT = "train.mtp_loss=0.1", "train.mtp_loss=0"


@dataclass(frozen=True)
class Case:
    """A checkpoint, and how zoo reads it."""

    write: Callable[..., Path]
    config: dict[str, Any]
    overrides: tuple[str, ...]


CASES = {
    "gemma3_text": Case(write_tiny_gemma3_text, {}, ("model.family=gemma3_text",)),
    "gemma3_text tied": Case(write_tiny_gemma3_text, {"tied": True}, ("model.family=gemma3_text",)),
    "qwen3": Case(write_tiny_qwen3, {}, ("model.family=qwen3",)),
    "qwen3 tied": Case(write_tiny_qwen3, {"tied": True}, ("model.family=qwen3",)),
    "qwen3 experts": Case(write_tiny_qwen3, {"moe": True}, ("model.family=qwen3",)),
    "qwen3_next": Case(write_tiny_qwen3_next, {}, ("model.family=qwen3_next", WITHOUT)),
    "qwen3_next with MTP": Case(write_tiny_qwen3_next, {"mtp": 1}, ("model.family=qwen3_next", WITH)),
    "qwen3_next, MTP carried": Case(write_tiny_qwen3_next, {"mtp": 1}, ("model.family=qwen3_next", WITHOUT)),
    "qwen3_next tied": Case(write_tiny_qwen3_next, {"tied": True, "mtp": 1}, ("model.family=qwen3_next", WITH)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("published", [True, False], ids=["as published", "experts in stacks"])
@pytest.mark.parametrize("name", CASES)
def test_what_goes_in_comes_out_as_published(name: str, published: bool, tmp_path: Path, cpu_world: Any) -> None:
    case = CASES[name]
    source = case.write(tmp_path / "in", **case.config)
    wanted = tensors(source)
    assert ("lm_head.weight" in wanted) != case.config.get("tied", False)
    assert any("experts.0." in tensor for tensor in wanted) == (
        name not in ("qwen3", "qwen3 tied", "gemma3_text", "gemma3_text tied")
    )
    before = load_plain(source).state_dict()
    if not published:
        rewrite(source, stacked)
    zoo = Zoo.load(source, cpu_world, *case.overrides)
    built = any(parameter.startswith("multi_token.") for parameter, _ in zoo.model.named_parameters())
    assert built == (WITH in case.overrides)
    with torch.no_grad():  # nothing of the source is copied but what is carried
        zoo.model.decoder.final_layernorm.weight += 1
    out = export(zoo, tmp_path / "out", source)
    wanted["model.norm.weight"] += 1
    before["model.norm.weight"] += 1
    if not published and built is False and "mtp" in case.config:
        wanted = {n: t for n, t in wanted.items() if not n.startswith("mtp.")}
        assert not differences({n: t for n, t in tensors(out).items() if not n.startswith("mtp.")}, wanted)
    else:
        assert not differences(tensors(out), wanted)
    after = load_plain(out)
    assert not differences(after.state_dict(), before)


def test_the_number_of_experts_has_its_published_key(tmp_path: Path, cpu_world: Any) -> None:
    """transformers saves it under another one."""
    folder = write_tiny_qwen3(tmp_path / "in", moe=True)
    assert "num_experts" not in json.loads((folder / "config.json").read_text())
    zoo = Zoo.load(folder, cpu_world, "model.family=qwen3")
    for source, options in ((folder, {}), (None, {"config": tiny_config(moe=True)})):
        out = export(zoo, tmp_path / f"out{source is None}", source, **options)
        assert json.loads((out / "config.json").read_text())["num_experts"] == 6


@pytest.mark.slow
def test_a_tied_head_that_is_stored_all_the_same(tmp_path: Path, cpu_world: Any) -> None:
    """As in Qwen3-0.6B and 1.7B."""
    folder = write_tiny_qwen3(tmp_path / "in", tied=True)

    def with_head(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        return stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}

    rewrite(folder, with_head)
    zoo = Zoo.load(folder, cpu_world, "model.family=qwen3")
    torch.testing.assert_close(
        zoo.model.embedding.word_embeddings.weight, tensors(folder)["lm_head.weight"], rtol=0, atol=0
    )
    rewrite(folder, lambda stored: stored | {"lm_head.weight": stored["lm_head.weight"] + 1})
    with pytest.raises(BridgeError, match=r"lm_head\.weight"):
        Zoo.load(folder, cpu_world, "model.family=qwen3")


def test_a_next_without_mtp(tmp_path: Path, cpu_world: Any) -> None:
    """A published config does not say how many layers of MTP there are: one, unless it does."""
    source = write_tiny_qwen3_next(tmp_path / "in")
    with pytest.raises(BridgeError, match=r"(?s)mtp\.fc\.weight: missing, .*train\.mtp_loss=0"):
        Zoo.load(source, cpu_world, "model.family=qwen3_next", WITH)
    zoo = Zoo.load(source, cpu_world, "model.family=qwen3_next", WITHOUT)
    fresh = export(zoo, tmp_path / "fresh", None, config=zoo.assembly.config.hf)
    assert json.loads((fresh / "config.json").read_text())["num_nextn_predict_layers"] == 0
    (fresh / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    zoo.assembly.processor.save(fresh)
    again = Zoo.load(fresh, cpu_world, "model.family=qwen3_next")
    assert not any(name.startswith("multi_token.") for name, _ in again.model.named_parameters())
