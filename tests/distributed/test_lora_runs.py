"""Runs with adapters: every parallel layout takes the same steps, a checkpoint resumes under another, exports are whole.

The hybrid with experts, from random weights, with adapters on every linear of tower and decoder and on the experts.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_tasks
from support.pool import Pool, PoolError
from support.weights import tensors

pytestmark = pytest.mark.slow

FOLLOWED, ADAPTERS = 5e-5, 2e-4  # as test_training.py has them for the hybrid
RECIPE, SIZE = "qwen35_vl_moe_sft", "tiny-moe"
COMMON = (
    *rank_tasks.ADAMW, "train.steps=3", "train.global_batch=4", "train.warmup_steps=0", "train.lr=3e-3", "train.eps=1e-4", "train.eval_rows=2",
    "train.save_every=2", "train.mtp_loss=0", "data.lookahead=8", "data.augment=0", "packing.budget=512", "packing.align=4",
    "log.tensorboard=false", "log.predictions=0", "lora.rank=6", "lora.parts=[vision,language]",
    "lora.targets=[all-linear,experts.gate_up_proj,experts.down_proj]",
)  # fmt: skip
PARALLEL: dict[str, tuple[int, tuple[str, ...]]] = {
    "serial": (1, ()),
    "dp2": (2, ("lora.dropout=0.2",)),
    "pp2 vpp2": (2, ("parallel.pp=2", "parallel.vpp=2")),
    "cp2": (2, ("parallel.cp=2",)),
    "tp2 ep2 etp2": (4, ("parallel.tp=2", "parallel.ep=2", "parallel.etp=2")),
}
Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def train(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Runs COMMON under a layout's name, each name once."""
    root, done = tmp_path_factory.mktemp("runs"), {}

    def run(name: str) -> dict[str, Any]:
        if name not in done:
            size, more = PARALLEL[name]
            folder = root / name.replace(" ", "_")
            arguments = ([*COMMON, *more, f"run.dir={folder}"], RECIPE, SIZE)
            done[name] = {**pool.run(size, rank_tasks.train, *arguments, timeout=300.0)[0], "folder": folder}
        return done[name]

    return run


def relative(found: float, wanted: float) -> float:
    return abs(found - wanted) / max(abs(wanted), 1e-12)


@pytest.mark.parametrize("name", [name for name in PARALLEL if name not in ("serial", "dp2")])
def test_same_steps_and_same_adapters(name: str, train: Train, record_property: Callable[[str, object], None]) -> None:
    serial, parallel = train("serial"), train(name)
    errors = {
        key: max(
            relative(mine[key], wanted[key]) for mine, wanted in zip(parallel["steps"], serial["steps"], strict=True)
        )
        for key in ("loss", "grad_norm")
    }
    assert serial["losses"][2] < 0.99 * serial["losses"][0]
    found, wanted = tensors(parallel["folder"] / "export"), tensors(serial["folder"] / "export")
    assert found.keys() == wanted.keys() and all(".lora_" in name for name in found)
    assert all(bool(tensor.any()) for tensor in wanted.values())
    errors["adapters"] = max(
        float((found[key] - want).norm() / want.norm().clamp(min=1e-3)) for key, want in wanted.items()
    )
    record_property("errors", {key: f"{error:.1e}" for key, error in errors.items()})
    assert errors["adapters"] < ADAPTERS and errors["loss"] < FOLLOWED and errors["grad_norm"] < FOLLOWED
    base, same = tensors(parallel["folder"] / "base"), tensors(serial["folder"] / "base")
    assert base.keys() == same.keys()
    for key in base:
        torch.testing.assert_close(base[key], same[key], rtol=0, atol=0)


def copied(run: Path, folder: Path) -> Path:
    """The run as it stood after two steps."""
    (folder / "checkpoints").mkdir(parents=True)
    for part in ("base", "checkpoints/iter_2"):
        shutil.copytree(run / part, folder / part)
    return folder


@pytest.mark.parametrize(("first", "then"), [("tp2 ep2 etp2", "pp2 vpp2"), ("pp2 vpp2", "serial")])
def test_a_checkpoint_goes_on_under_another_layout(
    first: str, then: str, train: Train, pool: Pool, tmp_path: Path
) -> None:
    size, more = PARALLEL[then]
    overrides = [*COMMON, *more, f"run.dir={copied(train(first)['folder'], tmp_path / 'run')}"]
    (last,) = pool.run(size, rank_tasks.train, overrides, RECIPE, SIZE, timeout=300.0)[0]["steps"]
    wanted = train("serial")["steps"][2]
    for key in ("loss", "grad_norm"):
        assert relative(last[key], wanted[key]) < FOLLOWED, key


def test_with_dropout_a_checkpoint_goes_on_to_the_bit(train: Train, pool: Pool, tmp_path: Path) -> None:
    whole, (size, more) = train("dp2"), PARALLEL["dp2"]
    overrides = [*COMMON, *more, f"run.dir={copied(whole['folder'], tmp_path / 'run')}"]
    (last,) = pool.run(size, rank_tasks.train, overrides, RECIPE, SIZE, timeout=300.0)[0]["steps"]
    for key in ("loss", "grad_norm"):
        assert last[key] == whole["steps"][2][key]
        assert relative(last[key], train("serial")["steps"][2][key]) > 1e-4, "nothing was dropped"
    found, wanted = tensors(tmp_path / "run" / "export"), tensors(whole["folder"] / "export")
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_dora_and_patterns_go_on_under_another_layout(pool: Pool, tmp_path: Path) -> None:
    """The export is peft's, magnitudes have moved, and the run that is gone on with takes the same step and exports the same."""
    import peft
    from support.tiny import load_plain

    own = [
        *COMMON, "lora.targets=[all-linear]", "lora.dora=true", "lora.rank_pattern={k_proj: 2, up_proj: 8}", "lora.alpha_pattern={o_proj: 9}",
        "lora.whole_parts=[merger]",
    ]  # fmt: skip
    task = ("qwen3_vl_sft", "tiny")
    whole = pool.run(
        2, rank_tasks.train, [*own, "parallel.tp=2", f"run.dir={tmp_path / 'whole'}"], *task, timeout=300.0
    )[0]
    assert whole["losses"][2] < 0.99 * whole["losses"][0]
    folder = copied(tmp_path / "whole", tmp_path / "run")
    (last,) = pool.run(1, rank_tasks.train, [*own, f"run.dir={folder}"], *task, timeout=300.0)[0]["steps"]
    for key in ("loss", "grad_norm"):
        assert relative(last[key], whole["steps"][2][key]) < FOLLOWED, key
    found, wanted = tensors(folder / "export"), tensors(tmp_path / "whole" / "export")
    assert found.keys() == wanted.keys() and any("lora_magnitude_vector" in name for name in wanted)
    for name, tensor in wanted.items():
        assert float((found[name] - tensor).norm()) < ADAPTERS * float(tensor.norm().clamp(min=1e-3)), name
    base = load_plain(folder / "base")
    lengths = {name: weight.norm(dim=1) for name, weight in base.state_dict().items() if weight.ndim == 2}
    adapted = peft.PeftModel.from_pretrained(base, folder / "export")
    held = peft.get_peft_model_state_dict(adapted)
    for name, tensor in found.items():
        torch.testing.assert_close(held[name], tensor, rtol=0, atol=0)
        if name.endswith("lora_magnitude_vector"):
            module = name.removeprefix("base_model.model.").removesuffix("lora_magnitude_vector")
            assert not torch.equal(tensor, lengths[f"{module}weight"]), name


def test_other_adapters_are_refused(train: Train, pool: Pool, tmp_path: Path) -> None:
    overrides = [*COMMON, "lora.rank=4", f"run.dir={copied(train('serial')['folder'], tmp_path / 'run')}"]
    with pytest.raises(PoolError, match=r"another recipe \(lora.rank: 6 there, 4 here\)"):
        pool.run(1, rank_tasks.train, overrides, RECIPE, SIZE)


@pytest.mark.parametrize("name", ["serial", "tp2 ep2 etp2"])
def test_the_base_has_no_gradient_and_no_optimizer_state(name: str, pool: Pool, tmp_path: Path) -> None:
    size, more = PARALLEL[name]
    ranks = pool.run(size, rank_tasks.one_step, [*COMMON, *more, f"run.dir={tmp_path}"], RECIPE, SIZE, timeout=300.0)
    for rank in ranks:
        assert rank["frozen"] > 5 * rank["adapters"] > 0
        assert rank["frozen that moved"] == rank["frozen with a gradient"] == 0
        assert rank["adapters that moved"] > 0.9 * rank["adapters"]
    # Two moments of each parameter, shared out over its replicas: two of what tensor parallelism cuts, one of the experts.
    experts = sum(rank["of experts"] for rank in ranks)
    others = sum(rank["adapters"] for rank in ranks) - experts
    replicas = 1 if size == 1 else 2
    if size == 1:
        assert experts == 0  # reduced as all others
    assert sum(rank["state"] for rank in ranks) == 2 * (others // replicas + experts)


def test_a_run_is_converted_scored_and_verified_with_its_adapters_merged(
    train: Train, call: Callable[..., Any], tmp_path: Path
) -> None:
    """Transformers, on the merged weights, gives the log-probabilities that zoo gives the run."""
    import peft
    from support.tiny import load_plain

    run = train("tp2 ep2 etp2")["folder"]
    call("convert", str(run), str(tmp_path / "merged"), quiet=True)
    found = call("verify", str(run), str(tmp_path / "merged"), rows="digits:heldout")
    assert found["equal"] and max(row["max_difference"] for row in found["rows"]) < 5e-5
    against = call("verify", str(run / "base"), str(tmp_path / "merged"))
    assert not against["equal"] and set(against["counts"]) == {"equal", "differs"}
    config = json.loads((run / "export" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(run / "base")
    adapted = peft.PeftModel.from_pretrained(load_plain(run / "base"), run / "export").merge_and_unload()
    wanted = load_plain(tmp_path / "merged").state_dict()
    for name, tensor in adapted.state_dict().items():
        assert torch.allclose(tensor, wanted[name], rtol=0, atol=1e-6), name


def test_further_runs_start_from_a_run_with_adapters(train: Train, pool: Pool, tmp_path: Path) -> None:
    """model.init: from its merged weights; lora.init: with its adapters."""
    first = train("serial")["folder"]
    still = [*COMMON, "train.steps=1", "train.lr=1e-30", "train.min_lr=0"]
    goes_on = [*still, f"model.init={first / 'base'}", f"lora.init={first / 'export'}", f"run.dir={tmp_path / 'on'}"]
    on = pool.run(2, rank_tasks.train, [*goes_on, "parallel.pp=2"], RECIPE, SIZE, timeout=300.0)[0]
    found, wanted = tensors(tmp_path / "on" / "export"), tensors(first / "export")
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    assert not (tmp_path / "on" / "base").exists()
    merged = [*still, f"model.init={first}", f"run.dir={tmp_path / 'merged'}"]
    anew = pool.run(2, rank_tasks.train, [*merged, "parallel.tp=2"], RECIPE, SIZE, timeout=300.0)[0]
    assert relative(anew["losses"][0], on["losses"][0]) < FOLLOWED
    by_folder = [
        *goes_on[:-2],
        f"lora.merge_first={first / 'export'}",
        f"run.dir={tmp_path / 'on_top'}",
        "parallel.tp=2",
    ]
    on_top = pool.run(2, rank_tasks.train, by_folder, RECIPE, SIZE, timeout=300.0)[0]
    assert relative(on_top["losses"][0], on["losses"][0]) < FOLLOWED
    quantised = [*merged, "lora.base_dtype=fp8", f"run.dir={tmp_path / 'fp8'}"]
    near = pool.run(1, rank_tasks.train, quantised, RECIPE, SIZE, timeout=300.0)[0]
    assert FOLLOWED < relative(near["losses"][0], on["losses"][0]) < 5e-3
    full = [*merged, "lora.rank=0", "train.lr=1e-2", "train.min_lr=1e-2", f"run.dir={tmp_path / 'full'}"]
    whole = pool.run(1, rank_tasks.train, full, RECIPE, SIZE, timeout=300.0)[0]
    assert relative(whole["losses"][0], on["losses"][0]) < FOLLOWED
    before, after = tensors(first / "base"), tensors(tmp_path / "full" / "export")
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert not {name for name in still if not name.startswith("model.visual.")}, "all of it is trained again"


def test_adapters_on_one_stage_of_two(train: Train, pool: Pool, tmp_path: Path) -> None:
    init = f"model.init={train('serial')['folder'] / 'base'}"
    overrides = [*COMMON, init, "lora.parts=[vision]", "lora.targets=[all-linear]"]
    more = {"serial": (), "staged": ("parallel.pp=2",)}
    serial, staged = (
        pool.run(1 + len(given), rank_tasks.train, [*overrides, *given, f"run.dir={tmp_path / name}"], RECIPE, "null", timeout=300.0)[0]
        for name, given in more.items()
    )  # fmt: skip
    for mine, wanted in zip(staged["steps"], serial["steps"], strict=True):
        for key in ("loss", "grad_norm"):
            assert relative(mine[key], wanted[key]) < FOLLOWED, key
    found, wanted = (tensors(tmp_path / name / "export") for name in ("staged", "serial"))
    assert found.keys() == wanted.keys()
    for key, want in wanted.items():
        assert float((found[key] - want).norm()) < ADAPTERS * float(want.norm().clamp(min=1e-3)), key
