"""Adapters, and parts trained whole beside them: parallel equals serial and packed equals unpacked, in loss and every gradient.

The models, rows and layouts of test_matrix.py, with adapters of random B on every linear of every part and on all experts.
Measured: 1.1e-5 of gradients (keys of the audio tower's last layer, see support.gathered), others below 6e-6.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from support.gathered import full_gradients, total_loss, worst
from support.matrix import MODELS, PARALLEL, REFUSED, Model, Parallel
from support.pool import Pool
from support.prepared import PACKED, PADDED, Prepared, lay_out
from support.rank_gradients import run_layouts

from zoo.config.compose import about
from zoo.registry import get_family

LIMIT = 2e-5
IN_FP8, IN_NF4 = (
    " in fp8",
    " in nf4",
)  # with a frozen base so, whose blocks are those of one rank where matrices are not cut
WHOLE = " whole"  # with adapters of the language model alone, and all other parts trained whole
DORA = " dora"  # with parts of other ranks and alphas
NAMES = ("dense", "deepstack", "gdn", "mtp", "llava", "omni")
LAYOUTS = {
    **{name: PARALLEL[name] for name in ("tp2", "tp2 sp", "pp2 vpp2", "cp2", "ep2", "ep2 etp2", "tp2 cp2")},
    "pp2 recompute": Parallel("", 2, ("parallel.pp=2", "engine.recompute=full")),
    "tp2 recompute": Parallel("", 2, ("parallel.tp=2", "engine.recompute=selective")),
}


def parts_of(model: Model) -> tuple[str, ...]:
    return get_family(about(model.recipe)["family"]).parts


def overrides(model: Model) -> tuple[str, ...]:
    experts = ",experts.gate_up_proj,experts.down_proj" if "moe" in model.recipe or "omni" in model.recipe else ""
    return (
        *model.overrides,
        "lora.rank=3",
        "lora.alpha=5",
        f"lora.targets=[all-linear{experts}]",
        f"lora.parts=[{','.join(parts_of(model))}]",
    )


@pytest.fixture(scope="module")
def prepared(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Prepared]:
    root = tmp_path_factory.mktemp("lora")

    @cache
    def prepare(name: str) -> Prepared:
        model = MODELS[name.removesuffix(IN_FP8).removesuffix(IN_NF4).removesuffix(WHOLE).removesuffix(DORA)]
        more = [f"lora.base_dtype={name[-3:]}"] if name.endswith((IN_FP8, IN_NF4)) else []
        if name.endswith(WHOLE):
            others = [part for part in parts_of(model) if part != "language"]
            more = ["lora.parts=[language]", f"lora.whole_parts=[{','.join(others)}]"]
        if name.endswith(DORA):
            more = [
                "lora.dora=true",
                "lora.rank_pattern={k_proj: 5, up_proj: 2}",
                "lora.alpha_pattern={v_proj: 2, o_proj: 9}",
            ]
        given = (*overrides(model), *more)
        return Prepared.run(pool, lay_out(model, model.groups, root / name, given, which=(PADDED, PACKED)))

    return prepare


CASES = [
    (parallel, model)
    for model in NAMES
    for parallel in LAYOUTS
    if (parallel.replace("recompute", "").strip(), model) not in REFUSED
]


CASES += [(parallel, f"deepstack{held}") for held in (IN_FP8, IN_NF4) for parallel in ("pp2 recompute", "cp2", "ep2")]
CASES += [(parallel, f"dense{DORA}") for parallel in LAYOUTS if not parallel.startswith("ep2")]
CASES += [
    (parallel, f"{name}{WHOLE}")
    for name in ("dense", "llava", "omni")
    for parallel in LAYOUTS
    if (parallel.replace("recompute", "").strip(), name) not in REFUSED
]


@pytest.mark.sampled(100)
@pytest.mark.parametrize(("parallel", "model"), CASES)
def test_gradients_of_adapters(
    parallel: str,
    model: str,
    pool: Pool,
    prepared: Callable[[str], Prepared],
    record_property: Callable[[str, object], None],
) -> None:
    plain, setting = prepared(model), LAYOUTS[parallel]
    plan = plain.with_overrides(*setting.overrides)
    ranks = pool.run(setting.ranks, run_layouts, plan, timeout=300.0)
    whole = {name.split(".")[0] for name in plain.gradients if ".lora." not in name}
    assert whole == (
        {part for part in parts_of(MODELS[model.removesuffix(WHOLE)]) if part != "language"}
        if WHOLE in model
        else set()
    )
    for index in range(len(plan.layouts)):
        held = [rank[index] for rank in ranks]
        loss_error = abs(total_loss(held) - plain.loss) / plain.loss
        error, name = worst(full_gradients(held), plain.gradients)
        record_property(str(index), f"loss {loss_error:.1e}, gradients {error:.1e} {name}")
        assert loss_error < LIMIT
        assert error < LIMIT, name


DROPPED = {
    "tp2": PARALLEL["tp2"],
    "tp2 recompute": LAYOUTS["tp2 recompute"],
    "tp2 sp": PARALLEL["tp2 sp"],
    "tp2 cp2": PARALLEL["tp2 cp2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", DROPPED)
def test_dropout_under_tensor_parallel(parallel: str, pool: Pool, prepared: Callable[[str], Prepared]) -> None:
    """Ranks with the same input drop the same of it: what they hold twice has the same gradient to the bit."""
    plain, setting = prepared("dense"), DROPPED[parallel]
    more = ("lora.dropout=0.3", "lora.parts=[language]", *setting.overrides)
    plan = replace(plain.with_overrides(*more), layouts=plain.plan.layouts[1:])
    ranks = pool.run(setting.ranks, run_layouts, plan, timeout=300.0)
    gradients = full_gradients([rank[0] for rank in ranks])
    assert all(bool(gradient.isfinite().all()) and bool(gradient.any()) for gradient in gradients.values())
    error, _ = worst(gradients, {name: plain.gradients[name] for name in gradients})
    assert error > 0.1, "nothing was dropped"
