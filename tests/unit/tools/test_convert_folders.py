"""Folders that transformers loads: with tensors that hold nothing of their own, and with a config that says more than is there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_llava
from support.tiny import rewrite
from support.tiny_internvl import write_tiny_internvl
from support.tiny_qwen3 import write_tiny_qwen3
from support.tiny_qwen3_vl import write_tiny_qwen3_vl
from support.tiny_qwen35 import write_tiny_qwen35
from support.weights import tensors

import zoo
from zoo.bridge import BridgeError
from zoo.bridge.mapping.table import SCORE
from zoo.cli.checkpoints.convert import run
from zoo.config.locate import read_arch
from zoo.errors import UserError
from zoo.model.meta_model import build_meta_model
from zoo.tools.convert import convert

HEAD, EMBEDDING = "lm_head.weight", "model.language_model.embed_tokens.weight"
BUFFERS = {
    "model.language_model.rotary_emb.inv_freq": torch.ones(3),
    "model.language_model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
    "model.visual.rotary_pos_emb.inv_freq": torch.ones(2),
}


LLAVA_BUFFERS = {  # as the published LLaVA 1.5 has them: places of CLIP's patches, angles of each layer
    "vision_tower.vision_model.embeddings.position_ids": torch.arange(17)[None],
    "language_model.model.layers.2.self_attn.rotary_emb.inv_freq": torch.ones(4),
}


def there_and_back(folder: Path, to: Path) -> dict[str, Any]:
    convert(folder, to / "zoo", quiet=True)
    convert(to / "zoo", to / "hf", quiet=True)
    return tensors(to / "hf")


def test_a_tied_head_that_equals_its_embedding_is_passed_over_and_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_qwen3_vl(tmp_path / "in", tied=True)
    wanted = tensors(folder)
    rewrite(folder, lambda saved: {**saved, HEAD: saved[EMBEDDING].clone()})
    found = there_and_back(folder, tmp_path)
    assert found.keys() == wanted.keys() and HEAD not in found
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=0)
    assert f"passing over {HEAD}" in capfd.readouterr().err


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", [lambda x: x + 1e-6, lambda x: x.bfloat16(), lambda x: x[:-1].clone()])
def test_a_tied_head_that_differs_is_refused(change: Any, tmp_path: Path) -> None:
    folder = write_tiny_qwen3_vl(tmp_path / "in", tied=True)
    rewrite(folder, lambda saved: {**saved, HEAD: change(saved[EMBEDDING])})
    with pytest.raises(BridgeError, match=f"(?s){HEAD}: differs from .*tie_word_embeddings=false") as caught:
        convert(folder, tmp_path / "zoo", quiet=True)
    assert "allow=" in str(caught.value) and not (tmp_path / "zoo").exists()
    convert(folder, tmp_path / "zoo", quiet=True, allow=[HEAD])
    about = json.loads((tmp_path / "zoo" / "zoo.json").read_text())
    assert [problem.partition(":")[0] for problem in about["allowed"]] == [HEAD]


def test_known_buffers_are_passed_over_and_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The head of a model that is not tied is its own, though it equals the embedding."""
    folder = write_tiny_qwen3_vl(tmp_path / "in")
    wanted = tensors(folder)
    rewrite(folder, lambda saved: {**saved, **BUFFERS, HEAD: saved[EMBEDDING].clone()})
    assert there_and_back(folder, tmp_path).keys() == wanted.keys() and HEAD in wanted
    assert "inv_freq and 2 more" in capfd.readouterr().err
    folder = tiny_llava.write_tiny_llava(tmp_path / "llava", "llava")
    wanted = tensors(folder)
    rewrite(folder, lambda saved: saved | LLAVA_BUFFERS)
    assert there_and_back(folder, tmp_path / "back").keys() == wanted.keys()


def test_other_tensors_are_not_taken_for_buffers(tmp_path: Path) -> None:
    folder = write_tiny_qwen3_vl(tmp_path / "in")
    rewrite(folder, lambda saved: saved | {"model.language_model.my_inv_freq": torch.ones(3)})
    with pytest.raises(BridgeError, match=r"(?s)my_inv_freq: unmapped.*allow=NAME") as caught:
        convert(folder, tmp_path / "zoo", quiet=True)
    assert len(caught.value.problems) == 1


def test_what_is_missing_names_what_helps(tmp_path: Path) -> None:
    folder = write_tiny_qwen35(tmp_path / "in", mtp=1)
    rewrite(folder, lambda saved: {n: t for n, t in saved.items() if n != "mtp.fc.weight"})
    with pytest.raises(BridgeError, match=r"(?s)mtp\.fc\.weight: missing.*train\.mtp_loss=0 builds the model without"):
        convert(folder, tmp_path / "zoo", quiet=True)


def test_an_embedding_model_has_no_head(tmp_path: Path) -> None:
    """It goes there and back as it is, and a reward model begins with it."""
    folder = write_tiny_qwen3_vl(tmp_path / "in")
    rewrite(folder, lambda saved: {name: tensor for name, tensor in saved.items() if name != HEAD})
    convert(folder, tmp_path / "zoo", quiet=True)
    wanted = tensors(folder)
    found = tensors(convert(tmp_path / "zoo", tmp_path / "back", quiet=True))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    scores = build_meta_model(read_arch(folder), [*wanted, SCORE])
    resolution = scores.bridge.resolve(wanted, scores.parameters, scores.dims)
    assert len(resolution.source) == len(wanted) and resolution.allowed == [f"{SCORE}: missing, {SCORE} needs it"]


def test_tensors_that_are_not_trained_are_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_qwen35(tmp_path / "in")
    rewrite(folder, lambda saved: {**saved, "mtp.fc.weight": torch.ones(3), "mtp.norm.weight": torch.ones(3)})
    there_and_back(folder, tmp_path)
    said = [line for line in capfd.readouterr().err.splitlines() if "not trained" in line]
    assert len(said) == 1 and said[0].endswith("2 tensors are not trained and go into exports as they are: mtp.*")


@pytest.mark.parametrize("there", [0, 1], ids=["without its weights", "with them"])
def test_the_number_of_mtp_layers_survives(there: int, tmp_path: Path) -> None:
    folder = write_tiny_qwen35(tmp_path / "in", mtp=there)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    found = there_and_back(folder, tmp_path)
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == config
    assert any(name.startswith("mtp.") for name in found) == bool(there)


@pytest.mark.parametrize("family", ["internvl", "llava"])
def test_a_model_that_is_right_for_short_samples_alone_is_converted(family: str, tmp_path: Path) -> None:
    """What a recipe's packing.budget decides, and weights do not: a dynamic rotary embedding, a sliding window."""
    if family == "internvl":
        folder = write_tiny_internvl(tmp_path / "in", "qwen2", text={"max_position_embeddings": 100})
    else:
        folder = tiny_llava.write_tiny_llava(tmp_path / "in", "llava_next", text={"sliding_window": 7})
    wanted, found = tensors(folder), there_and_back(folder, tmp_path)
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    assert zoo.verify(folder, tmp_path / "zoo").equal


FORMS: list[tuple[list[str], list[dict[str, Any]]]] = [
    (["dtype=bf16"], [{"dtype": "bf16"}, {"dtype": "bfloat16"}, {"dtype": torch.bfloat16}]),
    (["max_shard_size=20KB"], [{"max_shard_size": "20KB"}, {"max_shard_size": "20 kb"}, {"max_shard_size": 20_000}]),
    (["allow=no.*,none.*"], [{"allow": "no.*,none.*"}, {"allow": ["no.*", "none.*"]}]),
    (["overwrite=true"], [{"overwrite": "true"}, {"overwrite": True}]),
]


@pytest.mark.parametrize(("options", "forms"), FORMS, ids=lambda one: one[0] if isinstance(one[0], str) else "")
def test_the_command_and_the_function_write_the_same(
    options: list[str], forms: list[dict[str, Any]], tmp_path: Path
) -> None:
    folder = write_tiny_qwen3(tmp_path / "in")

    def files(target: Path) -> dict[str, bytes]:
        return {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}

    assert run([str(folder), str(tmp_path / "out"), *options, "--quiet"]) == 0
    wanted = files(tmp_path / "out")
    for number, given in enumerate(forms):
        assert files(zoo.convert(folder, tmp_path / str(number) / "out", quiet=True, **given)) == wanted, given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": "int8"}, "dtype=int8: wanted one of bf16, fp16, fp32"),
        ({"dtype": torch.float64}, "dtype=torch.float64: wanted one of bf16, fp16, fp32"),
        ({"max_shard_size": 0}, "max_shard_size=0: wanted a number of bytes, or a size such as 5GB"),
        ({"max_shard_size": -5}, "max_shard_size=-5"),
        ({"max_shard_size": "5 apples"}, "max_shard_size=5 apples"),
        ({"max_shard_size": True}, "max_shard_size=True"),
        ({"overwrite": "perhaps"}, "overwrite=perhaps: wanted true or false"),
    ],
)
def test_a_value_that_is_none_of_its_kind(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        zoo.convert(tmp_path, tmp_path / "out", **given)
