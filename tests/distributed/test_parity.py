"""Parallel equals serial beyond the matrix: more layouts, more micro-batches with every mixture of media, tied weights.

Loss and every gradient of a step, against the samples one by one on a single rank.

The real engine throughout: build_model, mcore's DDP, schedules and finalize_model_grads. Gradients are put together
from what all ranks hold; where several hold the same part (towers under TP and CP, everything under DP) it must be
the same to the bit on each.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Batch, packed_batch, recipe_for
from support.gathered import LIMIT, full_gradients, total_loss, worst
from support.pool import Pool
from support.rank_gradients import Held, Plan, run_step
from torch import Tensor

from zoo.model.build import assemble
from zoo.steps import StepRank

# Four micro-batches of every mixture of media; the second has none.
GROUPS = (
    ("image-long", "audio-short", "text-short", "video-long", "image+video+audio"),
    ("text-long", "text-short"),
    ("multi_image-long", "spoken+image+spoken+audio", "audio-long"),
    ("audio_in_video-short", "image-short", "turns", "audio+video+image+image", "video-short"),
)

# ranks and overrides; test_matrix.py has the usual ones
PARALLEL = {
    "tp2 etp2": (2, ["parallel.tp=2", "parallel.etp=2"]),
    "pp4": (4, ["parallel.pp=4"]),
    "ep2 etp2": (4, ["parallel.ep=2", "parallel.etp=2"]),
    "tp2 ep2": (2, ["parallel.tp=2", "parallel.ep=2"]),
    "dp4": (4, []),
    "pp2 vpp2 tp2": (4, ["parallel.pp=2", "parallel.vpp=2", "parallel.tp=2"]),
    "pp2 ep2": (4, ["parallel.pp=2", "parallel.ep=2"]),
    # deepstack on its way through stages whose layers are run twice
    "pp4 recompute": (4, ["parallel.pp=4", "engine.recompute=full"]),
    "pp2 vpp2 recompute": (2, ["parallel.pp=2", "parallel.vpp=2", "engine.recompute=selective"]),
}
TIED = {
    "tp2": (2, ["parallel.tp=2"]),
    "pp2": (2, ["parallel.pp=2"]),
    "tp2 pp2": (4, ["parallel.tp=2", "parallel.pp=2"]),
}


@pytest.fixture(scope="module")
def labels(samples: dict[str, Any]) -> int:
    return sum(samples[name].num_labels for group in GROUPS for name in group)


@pytest.fixture(scope="module")
def plain(
    pool: Pool, even_omni: Path, samples: dict[str, Any], labels: int, store: Callable[[list[Batch]], str]
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the samples one by one on one rank, without padding."""
    batches = store([packed_batch([samples[name]]) for group in GROUPS for name in group])
    held = pool.run(1, run_step, Plan(folder=str(even_omni), batches=batches, labels=labels))
    return total_loss(held), full_gradients(held)


@pytest.fixture(scope="module")
def packed(samples: dict[str, Any], store: Callable[[list[Batch]], str]) -> str:
    return store([packed_batch([samples[name] for name in group]) for group in GROUPS])


def same(
    held: list[Held],
    plain: tuple[float, dict[str, Tensor]],
    record: Callable[[str, object], None],
    limit: float = LIMIT,
) -> None:
    loss, wanted = plain
    error = abs(total_loss(held) - loss) / loss
    largest, name = worst(full_gradients(held), wanted)
    record("loss_error", f"{error:.1e}")
    record("gradient_error", f"{largest:.1e} {name}")
    assert error < LIMIT
    assert largest < limit, name


@pytest.mark.slow
@pytest.mark.parametrize("parallel", PARALLEL)
def test_packed(
    parallel: str,
    pool: Pool,
    even_omni: Path,
    packed: str,
    labels: int,
    plain: tuple[float, dict[str, Tensor]],
    record_property: Callable[[str, object], None],
) -> None:
    size, overrides = PARALLEL[parallel]
    plan = Plan(folder=str(even_omni), batches=packed, labels=labels, overrides=tuple(overrides))
    same(pool.run(size, run_step, plan), plain, record_property)


@pytest.fixture(scope="module")
def plain_tied(pool: Pool, tied_omni: Path, packed: str, labels: int) -> tuple[float, dict[str, Tensor]]:
    held = pool.run(1, run_step, Plan(folder=str(tied_omni), batches=packed, labels=labels))
    return total_loss(held), full_gradients(held)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", TIED)
def test_tied_embeddings(
    parallel: str,
    pool: Pool,
    tied_omni: Path,
    packed: str,
    labels: int,
    plain_tied: tuple[float, dict[str, Tensor]],
    record_property: Callable[[str, object], None],
) -> None:
    """Embedding and head share a weight, which the first and the last stage both hold."""
    size, overrides = TIED[parallel]
    plan = Plan(folder=str(tied_omni), batches=packed, labels=labels, overrides=tuple(overrides))
    held = pool.run(size, run_step, plan)
    for part in held:
        head = part.gradients.pop("output_layer.weight", None)
        assert (head is not None) == ("pp2" in parallel and part.pp_rank == 1)
        if head is not None:
            part.gradients["embedding.word_embeddings.weight"] = head
            part.shards["embedding.word_embeddings.weight"] = part.shards.pop("output_layer.weight")
    same(held, plain_tied, record_property, 2e-5)  # 1.02e-5: the bias of a convolution over a long clip


class Group:
    """Stands in for a context-parallel group where nothing is sent."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = (lambda: rank), (lambda: size)


@pytest.mark.parametrize("size", [2, 4])
def test_images_lie_across_context_parallel_chunks(size: int, even_omni: Path, samples: dict[str, Any]) -> None:
    """What the tests above mean to hold: media cut between ranks, of packed rows, each embedding on one rank."""
    recipe = recipe_for(even_omni, f"parallel.cp={size}", ranks=size)
    assembly = assemble(recipe)
    step = assembly.family.load("step")
    steps = [
        step(assembly.config, recipe.packing, StepRank(torch.device("cpu"), Group(rank, size))) for rank in range(size)
    ]
    straddling = 0
    for group in GROUPS:
        batch = packed_batch([samples[name] for name in group])
        parts = steps[0].pack(batch, steps[0].capture(batch))
        here = [one.shard(parts, batch.media, evaluate=False, logits=False)[0].placements for one in steps]
        if "vision" not in parts.placements:
            assert not any("vision" in placements for placements in here)
            continue
        sources = [placements["vision"].source for placements in here]
        whole = parts.placements["vision"]
        assert sorted(torch.cat(sources).tolist()) == whole.source.tolist()
        segments = parts.segment_ids[0, whole.rows]
        holders = Counter(segment for source in sources for segment in set(segments[source].tolist()))
        straddling += sum(count > 1 for count in holders.values())
    assert straddling >= 6


QUIET = {
    "dp2": (2, ()),
    "tp2": (2, ("parallel.tp=2",)),
    "pp2": (2, ("parallel.pp=2",)),
    "cp2": (2, ("parallel.cp=2",)),
    "pp2 cp2": (4, ("parallel.pp=2", "parallel.cp=2")),
    "ep2": (2, ("parallel.ep=2",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", QUIET)
def test_a_micro_batch_without_labels_and_one_without_media(
    parallel: str,
    pool: Pool,
    even_omni: Path,
    samples: dict[str, Any],
    store: Callable[[list[Batch]], str],
    record_property: Callable[[str, object], None],
) -> None:
    """Nobody waits and nothing is NaN: under DP a rank without labels, a rank without media; the mean is that of one rank."""
    seen, heard, text = (samples[name] for name in ("image-long", "audio-long", "text-long"))
    mute = packed_batch([seen, heard])
    assert mute.labels is not None
    batches = store([replace(mute, labels=torch.full_like(mute.labels, -100)), packed_batch([text, text])])
    plans = [
        Plan(folder=str(even_omni), batches=batches, labels=2 * text.num_labels, overrides=overrides)
        for overrides in ((), QUIET[parallel][1])
    ]
    alone = pool.run(1, run_step, plans[0])
    held = pool.run(QUIET[parallel][0], run_step, plans[1])
    same(held, (total_loss(alone), full_gradients(alone)), record_property)
