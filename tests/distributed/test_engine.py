"""`zoo.Engine` under every layout gives what one rank gives: values of each row, whole gradients, and weights after an update."""

from collections.abc import Callable

import pytest
import torch
from support.gathered import LIMIT, full_gradients, worst
from support.loops import BUCKET, Looped, LoopPlan, loop_batch, loop_examples, run_few_rows, run_loop
from support.matrix import MODELS, PARALLEL
from support.pool import Pool

Plain = Callable[[str], tuple[LoopPlan, Looped]]


@pytest.fixture(scope="module")
def plain(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """A model's plan, and what one rank makes of it in one micro-batch."""
    done: dict[str, tuple[LoopPlan, Looped]] = {}

    def of(name: str) -> tuple[LoopPlan, Looped]:
        if name not in done:
            model, root = MODELS[name], tmp_path_factory.mktemp(name)
            folder = model.write(root / "model")
            examples = loop_examples(folder, model)
            torch.save(loop_batch(examples), root / "batch.pt")
            longest = max(example.length for example in examples)
            plan = LoopPlan(str(folder), name, str(root / "batch.pt"), (f"packing.budget={longest + 40}",), 0.8)
            whole = LoopPlan(plan.folder, name, plan.batch, ("packing.budget=8192",), plan.temperature)
            done[name] = plan, pool.run(1, run_loop, whole, timeout=300.0)[0]
        return done[name]

    return of


FAST = ("ep2", "moe", True)
CASES = [
    FAST,
    ("dp2", "dense", True),
    ("tp2", "gdn", True),
    ("tp2 sp", "deepstack", False),
    ("pp2", "mtp", True),
    ("pp2 vpp2", "dense", False),
    ("cp2", "moe", False),
    ("pp2 cp2", "dense", False),
    ("cp2 ep2", "omni", False),
    ("tp2 cp2", "llava", False),
    ("ep2 etp2", "deepstack", False),
    ("tp2 pp2", "omni", False),
]


@pytest.mark.parametrize(
    ("parallel", "model", "joined"),
    [pytest.param(*case, marks=[] if case == FAST else pytest.mark.slow) for case in CASES],
)
def test_a_layout_gives_what_one_rank_gives(parallel: str, model: str, joined: bool, pool: Pool, plain: Plain) -> None:
    plan, alone = plain(model)
    setting = PARALLEL[parallel]
    spread = LoopPlan(**{**vars(plan), "overrides": (*plan.overrides, *setting.overrides), "joined": joined})
    ranks = pool.run(setting.ranks, run_loop, spread, timeout=300.0)
    for rank in ranks:
        at = torch.tensor(rank.rows)
        for name in ("logprobs", "entropy", "after", "replayed"):
            found, wanted = getattr(rank, name), getattr(alone, name)[at]
            assert float(((found - wanted).abs() / wanted.abs().clamp(min=1.0)).max()) < 2 * LIMIT, name
        assert rank.outcome.micro_batches > 1 or len(rank.rows) < len(alone.rows)
        assert rank.outcome.tokens == alone.outcome.tokens
        assert rank.outcome.loss == pytest.approx(alone.outcome.loss, rel=1e-5)
        assert rank.outcome.metrics["clipped"] == alone.outcome.metrics["clipped"] > 0
        assert (rank.routing is None) == (alone.routing is None)
        if rank.routing is not None and alone.routing is not None:
            torch.testing.assert_close(rank.routing, alone.routing[at], rtol=0, atol=0)
        assert not rank.wrong and not rank.misplaced
        assert rank.peak <= BUCKET + 2 * rank.largest, (rank.peak, rank.largest)
    error, name = worst(full_gradients([rank.held for rank in ranks]), full_gradients([alone.held]))
    assert error < LIMIT, name
    moved = (alone.after - alone.logprobs).abs().max()
    assert float(moved) > 1e-3, "the update moved nothing"


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("qwen3_omni_sft", ("parallel.ep=2",)),
        pytest.param("qwen3_vl_sft", (), marks=pytest.mark.slow),
        pytest.param("qwen3_vl_sft", ("parallel.pp=2", "parallel.vpp=2"), marks=pytest.mark.slow),
        pytest.param("qwen3_omni_sft", ("parallel.cp=2",), marks=pytest.mark.slow),
    ],
)
def test_replicas_without_a_row(recipe: str, overrides: tuple[str, ...], pool: Pool) -> None:
    alone = pool.run(1, run_few_rows, recipe, (), timeout=300.0)[0]
    assert alone.shape[0] == 2 and alone.outcome.applied and alone.outcome.metrics == {"rows": 2.0}
    replicated = not overrides or "parallel.ep=2" in overrides
    ranks = pool.run(4 if not replicated else 2, run_few_rows, recipe, overrides, timeout=300.0)
    assert {rank.shape[0] for rank in ranks} == {2, 0}
    for rank in ranks:
        if rank.shape[0]:
            assert torch.allclose(rank.logprobs, alone.logprobs, atol=1e-5)
        assert rank.outcome.applied and rank.outcome.tokens == alone.outcome.tokens
        assert rank.outcome.loss == pytest.approx(alone.outcome.loss, rel=1e-5)
        assert rank.outcome.metrics == alone.outcome.metrics
        assert rank.outcome.grad_norm == pytest.approx(alone.outcome.grad_norm, rel=1e-4)
        assert torch.allclose(rank.after, alone.after, atol=1e-4)
        assert (rank.empty.tokens, rank.empty.loss, rank.empty.applied) == (0, 0.0, False)
