"""zoo's AdamW in runs: that of separate fp32 weights to the bit, and resumed from and into every form of its state."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from support import optimizer_tasks, rank_tasks
from support.pool import Pool
from support.weights import tensors

from zoo.nn.adamw.state import MOMENTS, join

STATE = "optimizer.state"

STEPS = 60
COMMON = (
    "train.global_batch=2", "train.warmup_steps=5", "train.lr=2e-3", "train.weight_decay=0.1", "train.clip_grad=1",
    "data.lookahead=8", "data.augment=0", "packing.budget=256", "packing.align=4", "log.tensorboard=false", "log.predictions=0", "export=false",
)  # fmt: skip


def follow(pool: Pool, folder: Path, how: str, precision: str) -> Any:
    """Losses and digests of weights of every rank and step."""
    overrides = (*COMMON, f"engine.precision={precision}", f"run.dir={folder}")
    return pool.run(2, optimizer_tasks.follow, overrides, STEPS, how, timeout=600.0)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "reference"), [("fp32", "separate"), ("bf16", "separate, away")])
def test_a_run_is_that_of_separate_fp32_weights_to_the_bit(
    precision: str, reference: str, pool: Pool, tmp_path: Path
) -> None:
    """60 steps of two ranks, gradients clipped in some. bf16 weights that lie halfway are rounded away from zero in both."""
    wanted = follow(pool, tmp_path / "wanted", reference, precision)
    assert follow(pool, tmp_path / "found", "zoo", precision) == wanted
    losses = wanted[0][0]
    assert len(losses) == STEPS and losses[-1] < 0.9 * losses[0]
    assert len({digest for _, digests in wanted for digest in digests}) >= STEPS


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_is_the_same_with_its_state_on_the_host(precision: str, pool: Pool, tmp_path: Path) -> None:
    found = [
        pool.run(2, optimizer_tasks.follow, (*COMMON, f"engine.precision={precision}", f"run.dir={tmp_path / str(share)}",
                 "train.exp_avg_dtype=bf16", f"train.optimizer_offload_fraction={share}"), 12, "zoo", timeout=300.0)
        for share in (0, 0.5, 1)
    ]  # fmt: skip
    assert found[0] == found[1] == found[2]


RECIPE, SIZE = "qwen35_vl_moe_sft", "tiny-moe"
SHORT = (
    *rank_tasks.ADAMW, "train.steps=3", "train.global_batch=4", "train.warmup_steps=0", "train.lr=3e-3", "train.eval_rows=2", "train.save_every=2",
    "train.keep=9", "data.lookahead=8", "data.augment=0", "packing.budget=512", "packing.align=4", "log.tensorboard=false", "log.predictions=0",
    "export=false", "run.accept_changes=[engine.precision]",
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """How a run is laid out, and how it holds its optimizer's state."""

    ranks: int
    layout: tuple[str, ...]
    precision: str
    moments: str
    offload: float = 0.0

    @property
    def keys(self) -> tuple[str, ...]:
        dtypes = (f"train.{name}_dtype={self.moments}" for name in MOMENTS)
        offload = f"train.optimizer_offload_fraction={self.offload}"
        return (*SHORT, *self.layout, f"engine.precision={self.precision}", *dtypes, offload)


DP2, PP2, CP2, EP2 = (), ("parallel.pp=2",), ("parallel.cp=2",), ("parallel.ep=2",)
TP2_EP2 = ("parallel.tp=2", "parallel.ep=2", "parallel.etp=2")
TP2_PP2 = ("parallel.tp=2", "parallel.pp=2")
SAVED_AND_LOADED = [
    (Form(1, (), "fp32", "fp32"), Form(2, EP2, "bf16", "fp8")),
    (Form(2, DP2, "bf16", "fp32"), Form(4, TP2_EP2, "bf16", "fp8", offload=0.5)),
    (Form(4, EP2, "bf16", "fp8", offload=1), Form(2, PP2, "bf16", "fp32")),
    (Form(2, PP2, "bf16", "bf16"), Form(2, CP2, "bf16", "fp8")),
    (Form(4, TP2_PP2, "bf16", "fp8"), Form(2, DP2, "fp32", "bf16")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), SAVED_AND_LOADED)
def test_a_save_is_loaded_in_every_form(saved: Form, loaded: Form, pool: Pool, tmp_path: Path) -> None:
    """Under another layout, too: fp32 weights are the same to the bit, moments to what their new format holds."""
    arguments = ([*saved.keys, f"run.dir={tmp_path / 'run'}"], RECIPE, SIZE)
    pool.run(saved.ranks, rank_tasks.train, *arguments, timeout=300.0)
    shutil.rmtree(tmp_path / "run/checkpoints/iter_3")

    def held(form: Form) -> dict[str, torch.Tensor]:
        overrides = (*form.keys, f"run.dir={tmp_path / 'run'}")
        arguments = (overrides, RECIPE, SIZE)
        return optimizer_tasks.assembled(pool.run(form.ranks, optimizer_tasks.held, *arguments, timeout=300.0))

    before, after = held(saved), held(loaded)
    assert len(masters(before)) > 20
    same(masters(after), masters(before))
    for name in MOMENTS:
        found, wanted = moments(after, name), moments(before, name)
        assert found.keys() == wanted.keys() == masters(before).keys()
        assert sum(int((values != 0).sum()) for values in wanted.values()) > 1000
        if loaded.moments == "fp8":
            for key, values in wanted.items():
                # Three bits of mantissa in a block whose largest value is at most that of the tensor.
                bound = values.abs() / 16 + values.abs().max() * (2.0**-17 if name == "exp_avg" else 2.0**-33)
                assert bool(((found[key] - values).abs() <= bound).all()), key
        else:
            same(found, {key: rounded(values, loaded.moments) for key, values in wanted.items()})


@pytest.mark.slow
def test_a_run_resumes_with_its_state_on_the_host_and_back_to_the_bit(pool: Pool, tmp_path: Path) -> None:
    every = (
        *SHORT,
        "train.save_every=1",
        "engine.precision=bf16",
        "train.exp_avg_dtype=bf16",
        "train.exp_avg_sq_dtype=fp8",
    )

    def run(share: float, name: str, start: str | None = None) -> list[dict[str, Any]]:
        """The steps of a run with this share on the host, from a checkpoint of another run if one is given."""
        if start is not None:
            shutil.copytree(tmp_path / start, tmp_path / name / "checkpoints" / Path(start).name)
        overrides = (*every, f"train.optimizer_offload_fraction={share}", "export=true", f"run.dir={tmp_path / name}")
        return pool.run(2, rank_tasks.train, overrides, RECIPE, SIZE, timeout=300.0)[0]["steps"]

    wanted = run(0, "whole")
    there = run(1, "there", "whole/checkpoints/iter_1")
    back = run(0, "back", "there/checkpoints/iter_2")
    assert [step["step"] for step in back] == [3]
    for mine, want in [*zip(there, wanted[1:], strict=True), (back[0], wanted[2])]:
        assert all(mine[key] == want[key] for key in ("loss", "grad_norm"))
    whole, found = (tensors(tmp_path / name / "export") for name in ("whole", "back"))
    same(found, whole)


def masters(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """fp32 weights that are trained, by name."""
    names = [key.removeprefix(f"{STATE}.exp_avg.") for key in held if key.startswith(f"{STATE}.exp_avg.")]
    rest = {name: held.get(f"{STATE}.remainder.{name}") for name in names}
    return {name: held[name] if bits is None else join(held[name], bits) for name, bits in rest.items()}


def moments(held: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    prefix = f"{STATE}.{name}."
    return {key.removeprefix(prefix): values.float() for key, values in held.items() if key.startswith(prefix)}


def rounded(values: torch.Tensor, dtype: str) -> torch.Tensor:
    return values.bfloat16().float() if dtype == "bf16" else values


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [key for key, values in wanted.items() if not torch.equal(found[key], values)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout", "bucket"),
    [
        (2, (), 0),
        (2, (), 100_000),
        (2, EP2, 0),
        (2, EP2, 100_000),
        (4, (*EP2, "parallel.pp=2"), 0),
        (4, ("parallel.pp=2", "parallel.vpp=2"), 100_000),
    ],
    ids=[
        "dp2",
        "dp2, beside the backward pass",
        "ep2",
        "ep2, beside the backward pass",
        "ep2 pp2",
        "pp2 vpp2, beside the backward pass",
    ],
)
def test_gradients_kept_in_bf16(ranks: int, layout: tuple[str, ...], bucket: int, pool: Pool, tmp_path: Path) -> None:
    """What the first update sees of two to four micro-batches a rank: each sum of two rounds to 8 bits, ranks' sums once.

    Gradients of parameters that are held in fp32 are kept so, too.
    """
    found = []
    for dtype, at_once in (("fp32", 0), ("bf16", bucket)):
        precision = ("engine.precision=bf16", f"train.main_grads_dtype={dtype}", "train.clip_grad=0")
        overrides = (*SHORT, *layout, *precision, f"run.dir={tmp_path / dtype}")
        arguments = (overrides, RECIPE, SIZE, 1, at_once)
        held = optimizer_tasks.assembled(pool.run(ranks, optimizer_tasks.held, *arguments, timeout=300.0))
        found.append(moments(held, "exp_avg"))
        half = {key for key in found[-1] if f"{STATE}.remainder.{key}" in held}
    wanted, rounded = found
    assert rounded.keys() == wanted.keys() and len(wanted) > 20
    errors = {
        key: float((rounded[key] - values).norm() / values.norm()) for key, values in wanted.items() if values.any()
    }
    exact = [key for key in errors.keys() - half if errors.pop(key) > 1e-6]
    assert not exact and half and wanted.keys() - half, exact
    assert len(errors) > 20 and min(errors.values()) > 1e-5, "gradients are rounded"
    assert median(errors.values()) < 4e-3
    # What micro-batches give to the delta rule's few decay rates almost cancels out.
    assert max(errors.values()) < 5e-2, max(errors, key=errors.__getitem__)


def test_updated_weights_are_gathered_once_and_tokens_exchanged_by_one_plan(pool: Pool, tmp_path: Path) -> None:
    overrides = (*COMMON, "parallel.ep=2", f"run.dir={tmp_path}", "train.warmup_steps=0")
    found = pool.run(2, optimizer_tasks.share_out, overrides, timeout=300.0)
    for one in found:
        assert one.gathered == [1], "one bucket, of the weights that both ranks have"
        assert one.moved > 0
        assert one.exchanges == {"ExchangeWithAll": 1}, "one for all layers"
        assert one.asked == 0, "the loader tells how many tokens the ranks have"
        assert {most for _, most in one.tokens} == {max(mine for one in found for mine, _ in one.tokens)}
    assert found[0].weights == found[1].weights


def test_ranks_that_share_a_row_exchange_their_parts_of_it(pool: Pool, tmp_path: Path) -> None:
    overrides = (*COMMON, "parallel.tp=2", "parallel.ep=2", f"run.dir={tmp_path}")
    for one in pool.run(2, optimizer_tasks.share_out, overrides, timeout=300.0):
        assert one.tokens and one.asked == 0
        assert all(mine == most for mine, most in one.tokens)


def test_no_layer_begins_before_its_weights_have_come(pool: Pool, tmp_path: Path) -> None:
    overrides = (*COMMON, f"run.dir={tmp_path}", "train.warmup_steps=0")
    for found in pool.run(2, optimizer_tasks.gather_ahead, overrides, timeout=300.0):
        assert found.groups > 10
        assert 0 < found.at_first_layer < found.groups, "those of later layers, and not all"
        assert not found.early and not found.behind and not found.behind_save
