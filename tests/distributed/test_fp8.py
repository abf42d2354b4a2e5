"""Products in FP8 under every kind of parallelism and recompute: as near to one rank's as one rank in FP8 is to one in bf16."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.gathered import full_gradients, total_loss
from support.pool import Pool
from support.prepared import PACKED, lay_out
from support.rank_gradients import Held, run_step
from support.stacks import TINY
from torch import Tensor

GROUPS = (("image-long", "text-short", "multi_image-long"), ("text-long", "image-long"))
LAYOUTS = {
    "tp2, sequence parallel": (2, ("parallel.tp=2", "parallel.sp=true")),
    "cp2": (2, ("parallel.cp=2",)),
    "pp2": (2, ("parallel.pp=2",)),
    "recomputed": (1, ("engine.recompute=full",)),
    "tp2 cp2, recomputed": (4, ("parallel.tp=2", "parallel.cp=2", "engine.recompute=full")),
}
FAST = ("tp2, sequence parallel", "recomputed")
FP8 = ("engine.precision=bf16", "engine.fp8=true")
Step = Callable[..., list[Held]]


@pytest.fixture(scope="module")
def step(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Step:
    """Loss and gradients of two micro-batches."""
    made, _ = lay_out(TINY["qwen3_vl"], GROUPS, tmp_path_factory.mktemp("fp8"), which=(PACKED,))

    def run(ranks: int, overrides: tuple[str, ...]) -> list[Held]:
        return pool.run(
            ranks, run_step, replace(made, batches=made.layouts[0].batches, overrides=overrides), timeout=300.0
        )

    return run


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """|found - wanted| / |wanted| of all gradients as one vector."""
    apart = sum(float((found[name].float() - want.float()).square().sum()) for name, want in wanted.items())
    return (apart / sum(float(want.float().square().sum()) for want in wanted.values())) ** 0.5


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in LAYOUTS])
def test_it_is_one_rank_in_fp8(name: str, step: Step) -> None:
    ranks, overrides = LAYOUTS[name]
    near, plain, found = step(1, FP8[:1]), step(1, FP8), step(ranks, (*FP8, *overrides))
    rounding = distance(full_gradients(plain), full_gradients(near))
    error = distance(full_gradients(found), full_gradients(plain))
    losses = total_loss(found), total_loss(plain)
    print(name, f"loss {losses[0] / losses[1] - 1:.1e}, gradient {error:.1e}, FP8 from bf16 {rounding:.1e}")
    assert abs(losses[0] / losses[1] - 1) < 5e-3
    assert 0.01 < rounding < 0.3 and error < rounding, (error, rounding)
    if ranks == 1:
        assert error == 0.0  # the same products once more
