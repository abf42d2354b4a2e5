"""Packed equals unpacked and parallel equals serial: every model under every parallel layout, samples laid out in four ways.

Loss, log-probability of every token and every gradient, against the samples one by one on a single rank. The real engine
throughout: build_model, mcore's DDP, schedules and finalize_model_grads. Gradients are put together from what all ranks
hold; where several hold the same part it must be the same to the bit on each.
"""

from collections.abc import Callable, Iterable
from functools import cache
from itertools import product

import pytest
import torch
from support.engine import Batch, recipe_for
from support.gathered import LIMIT, full_gradients, total_loss, worst
from support.matrix import CORE, LAYOUTS, MODELS, PARALLEL, REFUSED
from support.pool import Pool
from support.prepared import Prepared, lay_out
from support.rank_gradients import Held, run_layouts
from torch import Tensor

from zoo.errors import ConfigError
from zoo.registry import families


@pytest.fixture(scope="module")
def prepared(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Prepared]:
    """By the name of a model, and how often each of its samples comes in a micro-batch."""
    root = tmp_path_factory.mktemp("matrix")

    @cache
    def prepare(name: str, times: int = 1) -> Prepared:
        model = MODELS[name]
        groups = [group * times for group in model.groups]
        return Prepared.run(pool, lay_out(model, groups, root / f"{name} {times}", model.overrides, logprobs=True))

    return prepare


def by_sample(batch: Batch, logprobs: Tensor) -> list[Tensor]:
    """(L,) of each sample out of what a step gives in the caller's shape, which is 0 everywhere else."""
    assert logprobs.shape == batch.input_ids.shape
    if batch.attention_mask is None:
        return list(logprobs[0].split(batch.lengths))
    assert not bool(logprobs[batch.attention_mask == 0].any())
    return [row[mask == 1] for row, mask in zip(logprobs, batch.attention_mask, strict=True)]


def logprob_error(held: list[Held], batches: list[Batch], wanted: list[Tensor]) -> float:
    """Largest difference of a token's log-probability, relative to its size or to 1; on every rank that has them."""
    error, found = 0.0, {}
    for part in held:
        for index, logprobs in part.logprobs.items():
            same = found.setdefault(index, logprobs)
            torch.testing.assert_close(same, logprobs, rtol=0, atol=0, msg="ranks of one micro-batch differ: {}".format)
    samples = [row for index in range(len(batches)) for row in by_sample(batches[index], found[index])]
    for got, want in zip(samples, wanted, strict=True):
        assert got.shape == want.shape
        error = max(error, float(((got - want).abs() / want.abs().clamp(min=1.0)).max()))
    return error


def test_what_zoo_list_shows_is_what_is_proved() -> None:
    """Each family's `proved`: the kinds of parallelism of its rows here that are not refused."""
    from zoo.config.compose import about

    found: dict[str, set[str]] = {}
    for name, model in MODELS.items():
        kinds = found.setdefault(about(model.recipe)["family"], set())
        for parallel, setting in PARALLEL.items():
            if (parallel, name) not in REFUSED:
                kinds |= setting.kinds
    assert {name: set(family.proved) for name, family in families().items()} == found


def test_the_fast_cells_combine_all_that_the_matrix_combines() -> None:
    """Each pair of kinds of parallelism that some row has, and each model."""

    def pairs(rows: Iterable[str]) -> set[frozenset[str]]:
        return {frozenset(pair) for row in rows for pair in product(PARALLEL[row].kinds, repeat=2)}

    assert pairs(parallel for parallel, _ in CORE) == pairs(PARALLEL)
    assert sorted(model for _, model in CORE) == sorted(MODELS)
    assert not CORE & REFUSED.keys()


@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        pytest.param(
            parallel,
            model,
            marks=[] if (parallel, model) in CORE or (parallel, model) in REFUSED else pytest.mark.slow,
            id=f"{parallel}-{model}",
        )
        for parallel, model in product(PARALLEL, MODELS)
    ],
)
def test_matrix(
    parallel: str,
    model: str,
    pool: Pool,
    prepared: Callable[..., Prepared],
    record_property: Callable[[str, object], None],
    measured: dict[tuple[str, str], float],
) -> None:
    plain, setting = prepared(model), PARALLEL[parallel]
    split = ["parallel.cp_split=zigzag"] if any("parallel.cp=" in key for key in setting.overrides) else []
    plan = plain.with_overrides(*setting.overrides, *split)
    if (parallel, model) in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[parallel, model]):
            recipe_for(plan.folder, *plan.overrides, recipe=plan.recipe, ranks=setting.ranks)
        return
    ranks = pool.run(setting.ranks, run_layouts, plan, timeout=300.0)
    largest = 0.0
    for index, layout in enumerate(LAYOUTS):
        held = [rank[index] for rank in ranks]
        errors = _errors(held, plain, index)
        largest = max(largest, errors[2])
        record_property(layout, "loss {:.1e}, logprobs {:.1e}, gradients {:.1e} {}".format(*errors))
        assert max(errors[:3]) < LIMIT, (layout, errors)
        assert_encoded_once(held, plain.batches[index])
        assert not any(part.whole for part in held)
    measured[parallel, model] = largest


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        ("cp2", "gdn"),
        ("cp4", "dense"),
        ("tp2 cp2", "omni"),
        ("pp2 cp2", "moe"),
        ("cp2", "two-way"),
        ("cp2 ep2", "mtp"),
        ("cp2", "tiles"),  # whose placeholders come as one token a medium
    ],
)
def test_context_parallel_ranks_may_hold_samples_whole(
    parallel: str, model: str, pool: Pool, prepared: Callable[..., Prepared]
) -> None:
    """Rows that ranks have equal shares of, as each sample comes as often as there are ranks, which need no chunks."""
    setting = PARALLEL[parallel]
    size = 4 if parallel == "cp4" else 2
    plain = prepared(model, size)
    ranks = pool.run(setting.ranks, run_layouts, plain.with_overrides(*setting.overrides), timeout=300.0)
    for index, layout in enumerate(LAYOUTS):
        held = [rank[index] for rank in ranks]
        errors = _errors(held, plain, index)
        assert max(errors[:3]) < LIMIT, (layout, errors)
        assert_encoded_once(held, plain.batches[index])
        rows = any("packing.mode=none" in override for override in plain.plan.layouts[index].overrides)
        assert all(part.whole == (0 if rows else len(plain.batches[index])) for part in held)


def _errors(held: list[Held], plain: Prepared, index: int) -> tuple[float, float, float, str]:
    """The largest relative errors of a layout's loss, log-probabilities and gradients, and the parameter with the last one."""
    error, name = worst(full_gradients(held), plain.gradients)
    tokens = logprob_error(held, plain.batches[index], plain.logprobs)
    return abs(total_loss(held) - plain.loss) / plain.loss, tokens, error, name


def _pictures(media: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"pixel_values": media["image_grids"]} if "image_grids" in media else {}


def assert_encoded_once(held: list[Held], batches: list[Batch]) -> None:
    """Every image, frame and clip goes through its tower once, whatever the number of ranks."""
    keys = {"vision": ("pixel_values", "pixel_values_videos"), "audio": ("input_features",)}
    for tower, names in keys.items():
        # A tower that takes a picture as a row of a batch, padded, is given its patches without padding.
        media = [{**batch.media, **_pictures(batch.media)} for batch in batches]
        rows = [len(one[name]) for one in media for name in names if name in one]
        assert sum(part.encoded.get(tower, 0) for part in held) == sum(rows), tower
