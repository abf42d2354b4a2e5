"""Checkpoints that are nearly alike, and configs that leave out what transformers writes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file
from support.tiny_qwen3_vl import write_tiny_qwen3_vl

import zoo
from zoo.cli.main import main
from zoo.config.compose import load_recipe
from zoo.config.recipes.matrix import recipe_names
from zoo.errors import UserError
from zoo.tools import verify as verify_module
from zoo.tools.convert import convert
from zoo.tools.hf_score import transformers_class
from zoo.tools.verify import verify

HEAD, EMBEDDING = "lm_head.weight", "model.language_model.embed_tokens.weight"


def with_head(folder: Path, add: float) -> Path:
    """A tied checkpoint that stores its head too."""
    file = write_tiny_qwen3_vl(folder, tied=True) / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {HEAD: tensors[EMBEDDING].clone() + add}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_a_tied_head_that_differs_is_found(tmp_path: Path) -> None:
    plain = write_tiny_qwen3_vl(tmp_path / "plain", tied=True)
    same, other = with_head(tmp_path / "same", 0.0), with_head(tmp_path / "other", 1.0)
    assert verify(plain, same).equal
    for a, b, status in ((plain, other, "missing in A"), (other, same, "missing in B")):
        differing = [tensor for tensor in verify(a, b).tensors if tensor.status != "equal"]
        assert [(tensor.name, tensor.status) for tensor in differing] == [(HEAD, status)]


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
def test_a_run_is_compared_as_its_export_has_it_and_nothing_is_written(
    lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = tmp_path / "run", write_tiny_qwen3_vl(tmp_path / "hf", moe=True)
    keys = [
        "recipe=qwen3_vl_moe_sft", f"model.init={folder}", "hardware=cpu", "nproc=1", "train.steps=1", "train.global_batch=2",
        "train.lr=1e-2", "train.min_lr=0", "train.warmup_steps=0", "train.optimizer=adamw", "export=false",
        "data.eval=none", "log.tensorboard=false", "log.predictions=0", f"run.dir={run}", *(["lora.rank=2"] if lora else []),
    ]  # fmt: skip
    assert main(["train", *keys]) == 0
    export = convert(run, tmp_path / "export", quiet=True)
    monkeypatch.setattr(verify_module, "convert", None)
    assert verify(run, export).equal
    shard = next(export.glob("*.safetensors"))
    tensors = load_file(shard)
    name = max(name for name in tensors if "experts" in name)
    tensors[name][1, 2, 3] += 1.0
    save_file(tensors, shard, metadata={"format": "pt"})
    changed = [one for one in verify(run, export).tensors if one.status != "equal"]
    assert [one.status for one in changed] == ["differs"] and "experts" in changed[0].name
    beside = run / "checkpoints" / "iter_1" / "hf" / "config.json"
    whole = beside.read_text()
    beside.write_text("{}")
    assert verify(run, run).equal and beside.read_text() == whole, "it is restored first"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("architectures", [None, [], ["Qwen3VLModel"], ["BertModel", "GPT2Model"]])
def test_transformers_model_is_that_of_the_model_type(
    architectures: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_qwen3_vl(tmp_path / "hf")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.pop("architectures", None)
    file.write_text(json.dumps(config if architectures is None else config | {"architectures": architectures}))
    rows = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "1 2"}, {"role": "assistant", "content": "3"}]
    rows.write_text(json.dumps({"messages": turns}) + "\n")
    bars = transformers.utils.logging.is_progress_bar_enabled()
    found = verify(folder, folder, rows=rows)
    assert found.equal and found.compared_rows[0]["labels"] > 0
    assert "Loading weights" not in capfd.readouterr().err, "no progress bars of transformers"
    assert transformers.utils.logging.is_progress_bar_enabled() == bars


def test_every_recipe_has_a_model_of_transformers() -> None:
    for name in recipe_names():
        arch = load_recipe(name, ["hardware=cpu"]).model.arch
        model = transformers_class(arch)
        kind = arch.get("thinker_config", arch)["model_type"]
        assert issubclass(model, transformers.GenerationMixin) and model.config_class.model_type == kind


def test_keys_of_a_recipe_are_refused_where_no_rows_are_computed(tmp_path: Path) -> None:
    for overrides in (["packing.mode=none"], {"packing.mode": "none"}):
        with pytest.raises(UserError, match=r"^packing.mode.*: keys of the recipe count for rows alone"):
            zoo.verify(tmp_path, tmp_path, overrides=overrides)


@pytest.mark.parametrize("tolerance", [math.nan, math.inf, -1.0, 1001, True, "0.1", None])
def test_a_tolerance_is_a_number_from_zero(tolerance: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^tolerance=.*: wanted a number from 0 to 1000"):
        zoo.verify(tmp_path, tmp_path, tolerance=tolerance)
