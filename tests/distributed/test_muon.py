"""Muon over ranks: the weights of one rank's run, under every layout; saves, resumes, and changes of the optimizer."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support import optimizer_tasks, rank_tasks
from support.pool import Pool, PoolError

pytestmark = pytest.mark.slow

STATE = "optimizer.state"
RECIPE, SIZE = "qwen35_vl_moe_sft", "tiny-moe"
COMMON = (
    "train.optimizer=muon", "train.global_batch=4", "train.warmup_steps=0", "train.lr=2e-3", "train.weight_decay=0.1", "train.clip_grad=0",
    "train.eval_rows=2", "train.keep=9", "data.lookahead=8", "data.augment=0", "packing.budget=512", "packing.align=4",
    "log.tensorboard=false", "log.predictions=0", "export=false", "engine.precision=fp32",
)  # fmt: skip


def held(
    pool: Pool, ranks: int, folder: Path, *overrides: str, steps: int = 0, bucket: int = 0,
    recipe: tuple[str, str] = (RECIPE, SIZE),
) -> Any:  # fmt: skip
    """Whole tensors of weights and optimizer state after so many steps, in fp32."""
    keys = (*COMMON, "train.steps=100", *overrides, f"run.dir={folder}")
    arguments = (keys, *recipe, steps, bucket)
    return optimizer_tasks.assembled(pool.run(ranks, optimizer_tasks.held, *arguments, timeout=300.0))


LAYOUTS = [
    ("dp2", 2, (), 0),
    ("dp4, many buckets", 4, (), 100_000),
    ("tp2", 2, ("parallel.tp=2",), 0),
    ("tp2 dp2", 4, ("parallel.tp=2",), 100_000),
    ("ep2", 2, ("parallel.ep=2",), 0),
    ("ep2 etp2 tp2", 4, ("parallel.tp=2", "parallel.ep=2", "parallel.etp=2"), 0),
    ("etp2 tp2 dp2", 4, ("parallel.tp=2", "parallel.etp=2"), 100_000),
    ("pp2 cp2", 4, ("parallel.pp=2", "parallel.cp=2"), 0),
]


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """One rank's tensors before and after two steps."""
    folder = tmp_path_factory.mktemp("alone")
    return held(pool, 1, folder / "0"), held(pool, 1, folder / "2", steps=2)


@pytest.mark.parametrize(
    ("ranks", "layout", "bucket"), [layout[1:] for layout in LAYOUTS], ids=[layout[0] for layout in LAYOUTS]
)
def test_ranks_make_the_updates_of_one(
    ranks: int, layout: tuple[str, ...], bucket: int, alone: tuple[Any, Any], pool: Pool, tmp_path: Path
) -> None:
    """Each weight's difference is small against its update; gradients of layouts differ in the order of sums."""
    before, wanted = alone
    found = held(pool, ranks, tmp_path / "run", *layout, steps=2, bucket=bucket)
    assert len(same_updates(found, wanted, before)) > 60


def test_ranks_make_the_updates_of_a_talker(pool: Pool, tmp_path: Path) -> None:
    recipe = "qwen3_omni_talker_sft", "tiny"
    before, wanted = (held(pool, 1, tmp_path / str(steps), steps=steps, recipe=recipe) for steps in (0, 2))
    layout = ("parallel.tp=2", "parallel.ep=2", "parallel.etp=2")
    found = held(pool, 4, tmp_path / "run", *layout, steps=2, recipe=recipe)
    trained = same_updates(found, wanted, before)
    assert len(trained) > 40 and all(name.startswith("talker.") for name in trained)
    squares = {key.removeprefix(f"{STATE}.exp_avg_sq.") for key in wanted if key.startswith(f"{STATE}.exp_avg_sq.")}
    assert (
        "talker.code_predictor.heads.0.weight" in squares and "talker.text_projection.linear_fc1.weight" not in squares
    )


def same_updates(found: Any, wanted: Any, before: Any) -> list[str]:
    """The names of all trained weights, whose updates are the wanted ones."""
    assert found.keys() == wanted.keys()
    trained = [key.removeprefix(f"{STATE}.exp_avg.") for key in wanted if key.startswith(f"{STATE}.exp_avg.")]
    errors = {}
    for name in trained:
        update = float((wanted[name] - before[name]).norm())
        errors[name] = float((found[name] - wanted[name]).norm()) / update
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < 2e-3, (worst, errors[worst])
    return trained


SAVED_AND_LOADED = [
    (1, (), "fp32", 2, ("parallel.tp=2",), "fp8"),
    (4, ("parallel.tp=2", "parallel.ep=2", "parallel.etp=2"), "bf16", 2, (), "bf16"),
]


@pytest.mark.parametrize(("ranks", "layout", "dtype", "others", "other", "loaded"), SAVED_AND_LOADED)
def test_a_save_is_loaded_under_other_layouts_and_formats(
    ranks: int, layout: Any, dtype: str, others: int, other: Any, loaded: str, pool: Pool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    keys = [*COMMON, "train.steps=2", f"train.exp_avg_dtype={dtype}", *layout, f"run.dir={run}"]
    pool.run(ranks, rank_tasks.train, keys, RECIPE, SIZE, timeout=300.0)
    before = held(pool, ranks, run, f"train.exp_avg_dtype={dtype}", *layout)
    after = held(pool, others, run, f"train.exp_avg_dtype={loaded}", *other)
    assert before.keys() == after.keys()
    for key, values in before.items():
        if not key.startswith(f"{STATE}.exp_avg."):
            torch.testing.assert_close(after[key], values, rtol=0, atol=0, msg=f"{key}: {{}}".format)
            continue
        assert values.any()
        bound = {"bf16": 2.0**-8, "fp8": 2.0**-4}[loaded] * values.float().abs()
        assert bool(((after[key].float() - values.float()).abs() <= bound + values.abs().max() * 2.0**-17).all()), key
    squares = {key.removeprefix(f"{STATE}.exp_avg_sq.") for key in after if key.startswith(f"{STATE}.exp_avg_sq.")}
    averages = {key.removeprefix(f"{STATE}.exp_avg.") for key in after if key.startswith(f"{STATE}.exp_avg.")}
    assert squares < averages
    assert {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"} <= squares
    assert not any(name.endswith(("linear_qkv.weight", "linear_fc2.weight", "experts.weight2")) for name in squares)


def test_a_resumed_run_is_the_same_to_the_bit(pool: Pool, tmp_path: Path) -> None:
    """Two ranks, gradients clipped, momentum in 8 bits."""
    keys = [*COMMON, "train.steps=4", "train.save_every=2", "train.clip_grad=1", "train.exp_avg_dtype=fp8"]
    keys += [f"run.dir={tmp_path / 'run'}"]
    first = pool.run(2, rank_tasks.train, keys, RECIPE, SIZE, timeout=300.0)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "run/checkpoints/iter_4").glob("*.bin")}
    shutil.rmtree(tmp_path / "run/checkpoints/iter_4")
    (tmp_path / "run/summary.json").unlink()
    second = pool.run(2, rank_tasks.train, keys, RECIPE, SIZE, timeout=300.0)
    again = {path.name: path.read_bytes() for path in (tmp_path / "run/checkpoints/iter_4").glob("*.bin")}
    assert first[0]["losses"] == second[0]["losses"] and len(whole) >= 2
    assert whole == again


@pytest.mark.parametrize(("old", "new"), [("adamw", "muon"), ("muon", "adamw")])
def test_another_optimizer_is_refused_unless_allowed(old: str, new: str, pool: Pool, tmp_path: Path) -> None:
    """Muon takes AdamW's average of gradients over; AdamW begins both moments of matrices at zero."""
    folder = tmp_path / "run"
    keys = [*COMMON, "train.steps=2", f"train.optimizer={old}", f"run.dir={folder}"]
    pool.run(1, rank_tasks.train, keys, RECIPE, SIZE, timeout=300.0)
    with pytest.raises(PoolError, match=rf"train\.optimizer: {old} there, {new} here"):
        held(pool, 2, folder, f"train.optimizer={new}")
    before = held(pool, 1, folder, f"train.optimizer={old}")
    allowed = (f"train.optimizer={new}", "run.accept_changes=[train.optimizer]")
    after = held(pool, 2, folder, *allowed)
    qkv = f"{STATE}.exp_avg.decoder.layers.3.self_attention.linear_qkv.weight"
    embedding = f"{STATE}.exp_avg.embedding.word_embeddings.weight"
    torch.testing.assert_close(after[embedding], before[embedding], rtol=0, atol=0)
    assert after[embedding].any()
    if new == "muon":
        torch.testing.assert_close(after[qkv], before[qkv], rtol=0, atol=0)
        assert after[qkv].any()
    else:
        assert not after[qkv].any() and not after[qkv.replace("exp_avg", "exp_avg_sq")].any()


def test_frozen_parts_and_bf16(pool: Pool, tmp_path: Path) -> None:
    """A frozen tower has no state and does not move; two ranks of bf16 weights follow one."""
    keys = ("model.freeze=[vision]", "engine.precision=bf16")
    before = held(pool, 1, tmp_path / "0", *keys)
    one = held(pool, 1, tmp_path / "1", *keys, steps=2)
    two = held(pool, 2, tmp_path / "2", *keys, steps=2)
    assert one.keys() == two.keys() and not any("exp_avg.vision" in key for key in one)
    frozen = [key for key in before if key.startswith("vision.")]
    assert frozen
    for key in frozen:
        torch.testing.assert_close(two[key], before[key], rtol=0, atol=0)
    for key in (key for key in one if key.endswith("linear_fc2.weight") and not key.startswith((STATE, "vision"))):
        update = (one[key].float() - before[key].float()).norm()
        assert update > 0 and float((two[key].float() - one[key].float()).norm() / update) < 0.2
