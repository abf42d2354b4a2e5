"""Runs that train a part whole beside adapters: every layout takes the same steps, resumes under another, and exports the same.

The hybrid with experts, from random weights: adapters of the decoder, its experts and the tower, whose merger is trained whole at a rate of its own.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import rank_tasks
from support.matrix import MODELS, PARALLEL
from support.pool import Pool, PoolError
from support.preference import pair_run, write_pairs
from support.weights import tensors

pytestmark = pytest.mark.slow

FOLLOWED, TENSORS = 5e-5, 2e-4  # as test_lora_runs.py has them
RECIPE, SIZE = "qwen35_vl_moe_sft", "tiny-moe"
COMMON = (
    *rank_tasks.ADAMW, "train.steps=3", "train.global_batch=4", "train.warmup_steps=0", "train.lr=3e-3", "train.eps=1e-4", "train.eval_rows=2",
    "train.save_every=2", "train.mtp_loss=0", "data.lookahead=8", "data.augment=0", "packing.budget=512", "packing.align=4",
    "log.tensorboard=false", "log.predictions=0", "lora.rank=6", "lora.parts=[vision,language]",
    "lora.targets=[all-linear,experts.gate_up_proj,experts.down_proj]", "lora.whole_parts=[merger]", "train.lr_scale.merger=2",
)  # fmt: skip
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "serial": (1, ()),
    "dp2": (2, ()),
    "tp2": (2, ("parallel.tp=2",)),
    "pp2": (2, ("parallel.pp=2",)),
    "cp2 ep2": (2, ("parallel.cp=2", "parallel.ep=2")),
}
Train = Callable[..., Path]


def steps_of(folder: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "grad_norm" in line}


@pytest.fixture(scope="module")
def train(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """The folder of a run of COMMON under a layout's name, each name once."""
    root, done = tmp_path_factory.mktemp("runs"), {}

    def run(name: str) -> Path:
        if name not in done:
            size, more = LAYOUTS[name]
            done[name] = root / name.replace(" ", "_")
            overrides = [*COMMON, *more, f"run.dir={done[name]}"]
            pool.run(size, rank_tasks.train, overrides, RECIPE, SIZE, timeout=300.0)
        return done[name]

    return run


def assert_follows(folder: Path, other: Path, *, from_step: int = 1) -> None:
    found, wanted = steps_of(folder), steps_of(other)
    for step in range(from_step, 4):
        for key in ("loss", "grad_norm"):
            assert found[step][key] == pytest.approx(wanted[step][key], rel=FOLLOWED), (step, key)
    exported, same = (load_file(one / "export" / "adapter_model.safetensors") for one in (folder, other))
    assert exported.keys() == same.keys()
    for name, tensor in same.items():
        assert float((exported[name] - tensor).norm() / tensor.norm().clamp(min=1e-3)) < TENSORS, name


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "serial"])
def test_same_steps_and_same_tensors(name: str, train: Train) -> None:
    assert_follows(train(name), train("serial"))


def test_what_is_trained_whole_moves_and_is_saved(train: Train) -> None:
    run = train("serial")
    exported, base = load_file(run / "export" / "adapter_model.safetensors"), tensors(run / "base")
    whole = {name.removeprefix("base_model.model."): one for name, one in exported.items() if ".lora_" not in name}
    assert whole and all(name.startswith("model.visual.merger.") for name in whole)
    assert all(not torch.equal(base[name], one) for name, one in whole.items())
    config = json.loads((run / "export" / "adapter_config.json").read_text())
    assert set(config["modules_to_save"]) == {name.rpartition(".")[0] for name in whole}


@pytest.mark.parametrize(("first", "then"), [("tp2", "pp2"), ("pp2", "serial"), ("serial", "cp2 ep2")])
def test_a_checkpoint_goes_on_under_another_layout(
    first: str, then: str, train: Train, pool: Pool, tmp_path: Path
) -> None:
    folder, (size, more) = tmp_path / "run", LAYOUTS[then]
    for part in ("base", "checkpoints/iter_2"):
        shutil.copytree(train(first) / part, folder / part)
    pool.run(size, rank_tasks.train, [*COMMON, *more, f"run.dir={folder}"], RECIPE, SIZE, timeout=300.0)
    assert_follows(folder, train("serial"), from_step=3)
    with pytest.raises(PoolError, match=r"lora.whole_parts: \[merger\] there, \[\] here"):
        other = [*(one for one in COMMON if "merger" not in one), f"run.dir={folder}"]
        pool.run(1, rank_tasks.train, other, RECIPE, SIZE)


def test_converted_it_is_what_peft_merges(train: Train, call: Callable[..., Any], tmp_path: Path) -> None:
    import peft
    from support.tiny import load_plain

    run = train("tp2")
    call("convert", str(run), str(tmp_path / "merged"), quiet=True)
    found = call("verify", str(run), str(tmp_path / "merged"), rows="digits:heldout")
    assert found["equal"] and max(row["max_difference"] for row in found["rows"]) < 5e-5
    adapted = peft.PeftModel.from_pretrained(load_plain(run / "base"), run / "export").merge_and_unload()
    wanted = load_plain(tmp_path / "merged").state_dict()
    for name, tensor in adapted.state_dict().items():
        assert torch.allclose(tensor, wanted[name], rtol=0, atol=1e-6), name
    base, merged = tensors(run / "base"), tensors(tmp_path / "merged")
    assert not any(torch.equal(base[name], merged[name]) for name in base if ".merger." in name)


def test_further_runs_start_from_it(train: Train, pool: Pool, tmp_path: Path) -> None:
    """model.init: from its merged weights, whatever this run freezes; lora.init: with its adapters and its part."""
    first = train("serial")
    still = [*COMMON, "train.steps=1", "train.lr=1e-30", "train.min_lr=0"]
    goes_on = [*still, f"model.init={first / 'base'}", f"lora.init={first / 'export'}", f"run.dir={tmp_path / 'on'}"]
    pool.run(2, rank_tasks.train, [*goes_on, "parallel.pp=2"], RECIPE, SIZE, timeout=300.0)
    found, wanted = tensors(tmp_path / "on" / "export"), tensors(first / "export")
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], one) for name, one in wanted.items())
    call = partial(rank_tasks.call, quiet=True)
    pool.run(1, call, "convert", str(first), str(tmp_path / "converted"), timeout=300.0)
    converted = tensors(tmp_path / "converted")
    anew = [one for one in still if not one.startswith(("lora.", "train.lr_scale"))]
    for name, more, where in (
        ("adapters", ("lora.rank=6", "lora.whole_parts=[vision]"), "base"),
        ("merger", ("model.freeze=[merger]",), "export"),
        ("tower", ("model.freeze=[vision]",), "export"),
    ):
        overrides = [*anew, *more, f"model.init={first}", f"run.dir={tmp_path / name}"]
        pool.run(1, rank_tasks.train, overrides, RECIPE, SIZE, timeout=300.0)
        found = tensors(tmp_path / name / where)
        assert found.keys() == converted.keys()
        assert all(torch.allclose(found[tensor], one, rtol=0, atol=1e-20) for tensor, one in converted.items()), name


def test_adapters_of_a_tower_whose_merger_a_later_run_names(pool: Pool, tmp_path: Path) -> None:
    """The merger's adapters are in the weights that another run starts from, and absent where they were frozen."""
    call = partial(rank_tasks.call, quiet=True)
    short = [one for one in COMMON if "merger" not in one and "train.steps" not in one] + ["train.steps=1"]
    for case, more in {"with": (), "without": ("model.freeze=[merger]",)}.items():
        first = tmp_path / case
        pool.run(1, rank_tasks.train, [*short, *more, f"run.dir={first}"], RECIPE, SIZE, timeout=300.0)
        pool.run(1, call, "convert", str(first), str(tmp_path / f"{case}-converted"), timeout=300.0)
        base, converted = tensors(first / "base"), tensors(tmp_path / f"{case}-converted")
        moved = [
            not torch.equal(base[name], converted[name])
            for name in base
            if ".merger.linear_fc" in name and "weight" in name
        ]
        assert moved and set(moved) == {case == "with"}
        for freeze in ("merger", "vision"):
            still = [
                *short,
                "lora.rank=0",
                "train.lr=1e-30",
                "train.min_lr=0",
                f"model.freeze=[{freeze}]",
                f"model.init={first}",
            ]
            still = [one for one in still if not one.startswith("lora.")]
            folder = tmp_path / f"{case}-{freeze}"
            pool.run(1, rank_tasks.train, [*still, f"run.dir={folder}"], RECIPE, SIZE, timeout=300.0)
            found = tensors(folder / "export")
            near = {name: torch.allclose(found[name], one, rtol=0, atol=1e-20) for name, one in converted.items()}
            assert all(near.values()), (case, freeze)


@pytest.mark.parametrize("parallel", ["dp2", "pp2 vpp2"])
def test_the_reference_has_the_first_weights_of_the_part(parallel: str, pool: Pool, tmp_path: Path) -> None:
    """New adapters change nothing, so the base in each step is what the run began with."""
    model, setting = MODELS["dense"], PARALLEL[parallel]
    folder = model.write(tmp_path / "model")
    common = (
        *write_pairs(tmp_path / "pairs.jsonl", 6, ("image", "text")), *model.overrides, "lora.rank=4", "lora.whole_parts=[vision]",
        "train.lr=3e-3", "train.schedule=constant", "packing.align=8", "train.aux_loss=0", "train.loss=dpo", f"model.init={folder}",
        "train.steps=3", "train.global_batch=2", "packing.budget=1024", "data.lookahead=4",
    )  # fmt: skip
    runs = {}
    for name, ranks, more in (
        ("start", 1, ()),
        ("base", 1, ("train.reference=base",)),
        ("spread", setting.ranks, ("train.reference=base", *setting.overrides)),
    ):
        overrides = (*common, *more, f"run.dir={tmp_path / name}")
        runs[name] = pool.run(ranks, pair_run, model.recipe, overrides, timeout=300.0)[0]
    for name in ("base", "spread"):
        for one, other in zip(runs[name], runs["start"], strict=True):
            for key in ("loss", "grad_norm", "rewards/margins"):
                if key in other:
                    assert one[key] == pytest.approx(other[key], rel=3e-4, abs=3e-5), (name, key)
    assert abs(runs["start"][2]["rewards/margins"]) > 1e-3, "the updates moved nothing"
