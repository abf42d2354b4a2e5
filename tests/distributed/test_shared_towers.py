"""Media dealt over the ranks that exchange tokens of experts (parallel.towers=shared): gradients as on one rank, whoever has the media."""

from collections.abc import Callable
from functools import cache

import pytest
from support.gathered import LIMIT, full_gradients, total_loss, worst
from support.matrix import MODELS
from support.pool import Pool
from support.prepared import PACKED, PADDED, Prepared, lay_out
from support.rank_gradients import Held, run_layouts, run_overlapped

SHARED, ADAPTERS = "parallel.towers=shared", ("lora.rank=4", "lora.parts=[language,vision,audio]")
PP2 = ("parallel.pp=2",)
EP2, EP2_TP2 = ("parallel.ep=2",), ("parallel.tp=2", "parallel.ep=2", "parallel.etp=2")
BUCKET = 20_000  # elements: towers have several buckets


@pytest.fixture(scope="module")
def prepared(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Prepared]:
    """By the name of a model and overrides: two micro-batches for each of two replicas; of two at once one has no media."""
    root = tmp_path_factory.mktemp("shared_towers")

    @cache
    def prepare(name: str, *overrides: str) -> Prepared:
        model = MODELS[name]
        groups = [*model.groups, *reversed(model.groups)]
        made = lay_out(
            model, groups, root / str(len(list(root.iterdir()))), (*model.overrides, *overrides), which=(PADDED, PACKED)
        )
        return Prepared.run(pool, made)

    return prepare


def check(ranks: list[list[Held]], plain: Prepared) -> None:
    """Loss and gradients are those of the samples one by one, each item is encoded once, and all ranks encode."""
    for index, batches in enumerate(plain.batches):
        held = [rank[index] for rank in ranks]
        error, name = worst(full_gradients(held), plain.gradients)
        assert abs(total_loss(held) - plain.loss) / plain.loss < LIMIT
        assert error < LIMIT, name
        media = ("pixel_values", "pixel_values_videos", "input_features")
        rows = sum(len(batch.media[one]) for batch in batches for one in media if one in batch.media)
        assert sum(sum(part.encoded.values()) for part in held) == rows
        assert all(part.encoded for part in held)


@pytest.mark.parametrize(
    ("model", "ranks", "overrides"),
    [
        ("omni", 2, EP2),  # deepstack and sound
        ("omni", 2, PP2),
        pytest.param("tiles", 2, PP2, marks=pytest.mark.slow),
        pytest.param("mtp", 2, PP2, marks=pytest.mark.slow),
        pytest.param("deepstack", 4, (*PP2, "parallel.tp=2"), marks=pytest.mark.slow),
        pytest.param("moe", 4, (*PP2, "parallel.ep=2"), marks=pytest.mark.slow),
        pytest.param("omni", 4, (*PP2, "parallel.cp=2"), marks=pytest.mark.slow),
        pytest.param("tiles", 2, (*PP2, "parallel.vpp=2"), marks=pytest.mark.slow),
        pytest.param("tiles", 2, EP2, marks=pytest.mark.slow),
        pytest.param("sigmoid", 4, EP2, marks=pytest.mark.slow),  # two groups
        pytest.param("deepstack", 4, EP2_TP2, marks=pytest.mark.slow),
        pytest.param("mtp", 4, ("parallel.cp=2", "parallel.ep=2"), marks=pytest.mark.slow),
        pytest.param("moe", 2, ("parallel.cp=2", "parallel.ep=2"), marks=pytest.mark.slow),
    ],
)
def test_gradients(
    model: str, ranks: int, overrides: tuple[str, ...], pool: Pool, prepared: Callable[..., Prepared]
) -> None:
    plain = prepared(model)
    check(pool.run(ranks, run_layouts, plain.with_overrides(*overrides, SHARED), timeout=300.0), plain)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [EP2, PP2])
@pytest.mark.parametrize("given", [ADAPTERS, ("model.freeze=[vision]",), ("model.freeze=[vision,audio]",)])
def test_adapters_and_frozen_towers(
    given: tuple[str, ...], layout: tuple[str, ...], pool: Pool, prepared: Callable[..., Prepared]
) -> None:
    plain = prepared("omni", *given)
    check(pool.run(2, run_layouts, plain.with_overrides(*layout, SHARED), timeout=300.0), plain)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [EP2, PP2])
def test_reductions_while_the_backward_pass_goes_on(
    layout: tuple[str, ...], pool: Pool, prepared: Callable[..., Prepared]
) -> None:
    plain = prepared("omni")
    check(pool.run(2, run_overlapped, plain.with_overrides(*layout, SHARED), BUCKET, timeout=300.0), plain)
