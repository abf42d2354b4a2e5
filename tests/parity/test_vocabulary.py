"""A tokenizer with more ids than the embedding has rows: refused, or given rows that transformers has after an export."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Zoo, packed_batch, recipe_for
from support.more_tokens import NEW, add_tokens
from support.tiny import load_plain
from support.tiny_qwen3 import write_tiny_qwen3
from support.tiny_qwen3_vl import write_tiny_qwen3_vl
from support.tiny_qwen35 import write_tiny_qwen35
from support.weights import differences, export, tensors

from zoo.config.compose import load_recipe
from zoo.data.sources.rows import Access, make_row
from zoo.errors import ConfigError, UserError
from zoo.model import build

RESIZE = "model.resize_embeddings=true"
CASES: dict[str, tuple[Callable[..., Path], dict[str, Any], tuple[str, ...]]] = {
    "qwen3": (write_tiny_qwen3, {}, ("model.family=qwen3",)),
    "qwen3 tied": (write_tiny_qwen3, {"tied": True}, ("model.family=qwen3",)),
    "qwen3_vl": (write_tiny_qwen3_vl, {}, ("model.family=qwen3_vl",)),
    "qwen35 with MTP": (write_tiny_qwen35, {"mtp": 1}, ("model.family=qwen35_vl", "train.mtp_loss=0.1")),
}


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], tuple[Path, int, tuple[str, ...]]]:
    """A checkpoint of a case with new tokens, the rows it needs, and how zoo reads it."""

    def write(name: str) -> tuple[Path, int, tuple[str, ...]]:
        make, config, overrides = CASES[name]
        folder = make(tmp_path / "in", **config)
        return folder, add_tokens(folder), overrides

    return write


@pytest.mark.parametrize("name", CASES)
def test_ids_without_a_row_are_one_sentence(name: str, written: Any, cpu_world: Any) -> None:
    folder, needed, overrides = written(name)
    with pytest.raises(UserError, match=rf"ids up to {needed - 1} \('<new-.*model.resize_embeddings=true") as said:
        build.assemble(recipe_for(folder, *overrides))
    assert "\n" not in str(said.value)


def test_a_special_token_that_no_sample_holds_needs_no_row(tmp_path: Path) -> None:
    """As in Gemma 3 of text alone, whose tokenizer has the images' token; one of the chat template does."""
    folder = write_tiny_qwen3(tmp_path / "in")
    add_tokens(folder, special=True)
    assert build.assemble(recipe_for(folder, "model.family=qwen3")).source.grown_from == 0
    with pytest.raises(UserError, match="resize_embeddings"):
        build.assemble(recipe_for(folder, "model.family=qwen3", f"data.special_tokens=[{NEW[7]}]"))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{# " + NEW[8] + " #}")
    with pytest.raises(UserError, match="resize_embeddings"):
        build.assemble(recipe_for(folder, "model.family=qwen3"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("name", CASES)
def test_new_rows_are_the_mean_and_are_exported(
    name: str, frozen: bool, written: Any, tmp_path: Path, cpu_world: Any
) -> None:
    folder, needed, overrides = written(name)
    zoo = Zoo.load(folder, cpu_world, *overrides, RESIZE)
    zoo.model.requires_grad_(not frozen)
    before = tensors(folder)
    out = export(
        zoo, tmp_path / "out", zoo.assembly.source, config=zoo.assembly.config.hf, processor=zoo.assembly.processor.hf
    )
    after = tensors(out)
    grown = {n for n in before if before[n].shape != after[n].shape}
    assert grown == {n for n in before if n.endswith(("embed_tokens.weight", "lm_head.weight"))}
    for name_of, old in before.items():
        rows = len(old) if name_of in grown else None
        torch.testing.assert_close(after[name_of][:rows], old, rtol=0, atol=0)
        if rows:
            mean = old.double().mean(dim=0).to(old.dtype)
            assert after[name_of].shape[0] == needed
            torch.testing.assert_close(after[name_of][rows:], mean.expand(needed - rows, -1), rtol=0, atol=0)
    config = json.loads((out / "config.json").read_text())
    assert config.get("text_config", config)["vocab_size"] == needed
    plain = load_plain(out)
    assert plain.get_input_embeddings().weight.shape[0] == needed
    turns = [{"role": "user", "content": f"a{NEW[0]}"}, {"role": "assistant", "content": f"{NEW[8]} b"}]
    row = make_row({"messages": turns}, "row", Access(tmp_path))
    sample = zoo.assembly.processor.encode(row, video_fps=1.0, max_frames=2)
    assert int(sample.input_ids.max()) == needed - 1
    (found,) = zoo.logits(packed_batch([sample]))
    with torch.no_grad():
        wanted = plain(sample.input_ids[None]).logits[0]
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    again = Zoo.load(out, cpu_world, *overrides)  # nothing is left to add
    assert not differences(
        {n: p.detach() for n, p in again.model.named_parameters()},
        {n: p.detach() for n, p in zoo.model.named_parameters()},
    )


def test_what_it_cannot_do_is_said(written: Any) -> None:
    folder, _, overrides = written("qwen3")
    with pytest.raises(ConfigError, match=r"lora.rank=4: adapters leave new rows"):
        recipe_for(folder, *overrides, RESIZE, "lora.rank=4")
    with pytest.raises(ConfigError, match=r"no effect on random weights \(model.init=random\)"):
        load_recipe("qwen3_omni_sft", ["size=tiny", "hardware=cpu", "model.init=random", RESIZE])
