"""A talker's ranks equal one rank: loss and every gradient of thinker and talker, or of a talker alone, of packed spoken rows.

Rows are one by one on one rank, and packed on several, with padding between them. One has a long question and a short answer, so that some
context-parallel rank has no frame of it.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Batch, packed_batch, recipe_for
from support.gathered import LIMIT, full_gradients, total_loss, worst
from support.pool import Pool
from support.rank_gradients import Plan, run_step
from support.rows import make_examples
from support.tiny_talker import CODES, write_tiny_talker

# Rows of two micro-batches, each with the frames that its answer is spoken in.
GROUPS = (
    {"image-long": 9, "text-short": 4, "audio-long": 14, "turns": 7, "video-short": 5},
    {"text-long": 2, "multi_image-long": 11},
)
PARALLEL = {
    "dp2": (2, []),
    "tp2 sp": (2, ["parallel.tp=2"]),
    "ep2": (2, ["parallel.ep=2"]),
    "cp2": (2, ["parallel.cp=2"]),
    "cp2 recompute": (2, ["parallel.cp=2", "engine.recompute=full"]),
    "ep2 etp2": (4, ["parallel.tp=2", "parallel.ep=2", "parallel.etp=2"]),
    "tp2 cp2": (4, ["parallel.tp=2", "parallel.cp=2"]),
}


class Rows:
    """Spoken rows where ranks can read them, and what one rank makes of them one by one."""

    def __init__(self, folder: Path, recipe: str) -> None:
        from zoo.model.build import assemble

        sizes = {"num_hidden_layers": 4, "mlp_only_layers": [1], "num_experts": 6}
        self.folder, self.recipe = folder, recipe
        self.checkpoint = write_tiny_talker(folder / "checkpoint", predictor={"num_key_value_heads": 2}, **sizes)
        assembly = assemble(recipe_for(self.checkpoint))
        self.speakers = sorted(assembly.config.hf.talker_config.speaker_id.values())
        examples = make_examples(assembly.processor)
        groups = [[self.said(examples[name].sample, *said) for name, said in group.items()] for group in numbered()]
        self.labels = sum(sample.label_weight for group in groups for sample in group)
        self.alone = self.stored("alone", [packed_batch([sample]) for group in groups for sample in group])
        self.packed = self.stored("packed", list(map(packed_batch, groups)))

    def said(self, sample: Any, number: int, frames: int) -> Any:
        from zoo.packing.spoken import COUNTS, FRAMES, SPEAKERS, WEIGHTS

        codes = torch.randint(CODES, (frames, 4), generator=torch.Generator().manual_seed(number))
        weight = (1.0, 0.5)[number % 2]
        speech = {
            FRAMES: codes,
            COUNTS: torch.tensor([frames]),
            SPEAKERS: torch.tensor([self.speakers[number % 2]]),
            WEIGHTS: torch.tensor([weight]),
        }
        return replace(sample, media={**sample.media, **speech}, codes=frames + 1, code_weight=weight)

    def stored(self, name: str, batches: list[Batch]) -> str:
        path = self.folder / f"{name}.pickle"
        path.write_bytes(pickle.dumps(batches))
        return str(path)

    def plan(self, batches: str, *overrides: str) -> Plan:
        return Plan(
            folder=str(self.checkpoint), batches=batches, labels=self.labels, recipe=self.recipe, overrides=overrides
        )  # fmt: skip


def numbered() -> list[dict[str, tuple[int, int]]]:
    """GROUPS, with the number of each row before its frames."""
    numbers = iter(range(100))
    return [{name: (next(numbers), frames) for name, frames in group.items()} for group in GROUPS]


@pytest.fixture(scope="module")
def rows(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Rows, float, Any]]:
    @cache
    def made(name: str) -> tuple[Rows, float, Any]:
        rows = Rows(tmp_path_factory.mktemp(name), f"qwen3_omni_{name}_sft")
        held = pool.run(1, run_step, rows.plan(rows.alone), timeout=300.0)
        return rows, total_loss(held), full_gradients(held)

    return made


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["speech", "talker"])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_ranks_equal_one(
    parallel: str, recipe: str, pool: Pool, rows: Callable[[str], Any], record_property: Callable[[str, object], None]
) -> None:
    made, loss, wanted = rows(recipe)
    size, overrides = PARALLEL[parallel]
    held = pool.run(size, run_step, made.plan(made.packed, *overrides), timeout=300.0)
    error, (largest, name) = abs(total_loss(held) - loss) / loss, worst(full_gradients(held), wanted)
    record_property("errors", f"loss {error:.1e}, gradients {largest:.1e} {name}")
    assert error < LIMIT
    assert largest < LIMIT, name
    learning = {name.partition(".")[0] for name, gradient in wanted.items() if bool(gradient.any())}
    assert (
        learning == {"talker"}
        if recipe == "talker"
        else learning > {"talker", "decoder", "embedding", "vision", "audio"}
    )
