"""A base in fewer bits under parallel layouts: folders are read into one rank's codes, and runs resume and convert."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_tasks
from support.pool import Pool
from support.tiny import ROPE
from support.tiny_qwen3_vl import write_tiny_qwen3_vl
from support.weights import same, tensors

pytestmark = pytest.mark.slow

RECIPE = "qwen3_vl_moe_sft"
LORA = ("lora.rank=4", "lora.targets=[all-linear,experts.gate_up_proj,experts.down_proj]")
# Ranks cut these between squares of 128 values.
WIDE = {
    "hidden_size": 64, "num_attention_heads": 4, "head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 256,
    "num_experts": 4, "num_hidden_layers": 4, "rope_parameters": ROPE | {"mrope_section": [12, 10, 10], "mrope_interleaved": True},
}  # fmt: skip
LAYOUTS = {
    "tp2": (2, ("parallel.tp=2",)),
    "pp2 vpp2": (2, ("parallel.pp=2", "parallel.vpp=2")),
    "ep2": (2, ("parallel.ep=2",)),
    "tp2 ep2 etp2": (4, ("parallel.tp=2", "parallel.ep=2", "parallel.etp=2")),
}
COMMON = (
    *LORA, "train.steps=3", "train.global_batch=2", "train.warmup_steps=0", "train.lr=3e-3", "train.min_lr=3e-3", "train.eval_rows=2",
    "train.save_every=2", "data.lookahead=4", "data.augment=0", "packing.budget=512", "packing.align=4", "log.tensorboard=false",
    "log.predictions=0", "train.eps=1e-4",
)  # fmt: skip


def write_codes(rank: int, size: int, folder: str, overrides: tuple[str, ...], target: str) -> int:
    """Load a folder under a layout and export what this rank's codes stand for; how many parameters are held so."""
    from support.engine import load_model, recipe_for

    from zoo.bridge.parallel import model_parameters
    from zoo.checkpoint.export import export
    from zoo.parallel.world import open_world

    recipe = recipe_for(folder, *LORA, *overrides, recipe=RECIPE, ranks=size)
    with open_world(recipe) as world:
        assembly, chunks = load_model(recipe, world)
        held = [parameter for _, parameter in model_parameters(chunks) if hasattr(parameter, "held")]
        for parameter in held:
            parameter.data = parameter.held.dense()
            del parameter.held
        export(chunks, Path(target), assembly, world, assembly.source)
    return len(held)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3_vl(tmp_path_factory.mktemp("wide") / "model", moe=True, **WIDE)


@pytest.mark.parametrize("base_dtype", ["fp8", "nf4"])
def test_codes_are_those_of_one_rank(base_dtype: str, wide: Path, pool: Pool, tmp_path: Path) -> None:
    given = (f"lora.base_dtype={base_dtype}",)
    pool.run(1, write_codes, str(wide), given, str(tmp_path / "serial"), timeout=300.0)
    wanted, before = tensors(tmp_path / "serial"), tensors(wide)
    moved = {name for name, tensor in wanted.items() if not torch.equal(tensor, before[name])}
    assert len(moved) > 20 and all(".language_model.layers." in name for name in moved)
    for name, (ranks, layout) in LAYOUTS.items():
        held = pool.run(ranks, write_codes, str(wide), (*given, *layout), str(tmp_path / name), timeout=300.0)
        assert min(held) > 3
        same(tensors(tmp_path / name), wanted)


def test_a_run_resumes_under_another_layout_and_converts(
    wide: Path, pool: Pool, call: Callable[..., Any], tmp_path: Path
) -> None:
    """The same last step; merged are the folder's own weights, as peft does it."""
    import peft
    from support.tiny import load_plain

    common = [*COMMON, f"model.init={wide}", "lora.base_dtype=nf4"]

    def train(name: str, ranks: int, *more: str) -> Any:
        given = [*common, *more, f"run.dir={tmp_path / name}"]
        return pool.run(ranks, rank_tasks.train, given, RECIPE, "tiny-moe", timeout=300.0)[0]

    first = train("first", 1)
    assert first["losses"][2] < first["losses"][0] and not (tmp_path / "first" / "base").exists()
    dense = train("dense", 1, "lora.base_dtype=model")
    assert first["losses"][0] != pytest.approx(dense["losses"][0], rel=1e-4)
    for name, (ranks, layout) in LAYOUTS.items():
        shutil.copytree(tmp_path / "first" / "checkpoints" / "iter_2", tmp_path / name / "checkpoints" / "iter_2")
        (last,) = train(name, ranks, *layout)["steps"]
        for key in ("loss", "grad_norm"):
            assert last[key] == pytest.approx(first["steps"][2][key], rel=5e-5), (name, key)
    call("convert", str(tmp_path / "tp2"), str(tmp_path / "merged"), quiet=True)
    config = json.loads((tmp_path / "tp2" / "export" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(wide)
    adapted = peft.PeftModel.from_pretrained(load_plain(wide), tmp_path / "tp2" / "export").merge_and_unload()
    merged = load_plain(tmp_path / "merged").state_dict()
    for weight, tensor in adapted.state_dict().items():
        assert torch.allclose(tensor, merged[weight], rtol=0, atol=1e-6), weight
