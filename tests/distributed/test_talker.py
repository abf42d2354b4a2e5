"""A talker's ranks equal one rank: loss and every gradient of thinker and talker, or of a talker alone, of packed spoken rows.

Rows are one by one on one rank, and packed on several, with padding between them. One has a long question and a short answer, so that some
context-parallel rank has no frame of it.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Batch, packed_batch, recipe_for
from support.gathered import LIMIT, full_gradients, total_loss, worst
from support.matrix import PARALLEL, REFUSED, TALKERS, Parallel
from support.pool import Pool
from support.rank_gradients import Plan, run_step
from support.rows import make_examples
from support.tiny_qwen25_talker import write_tiny_qwen25_talker
from support.tiny_talker import CODES, write_tiny_talker

# Rows of two micro-batches, each with the frames that its answer is spoken in.
GROUPS = (
    {"image-long": 9, "text-short": 4, "audio-long": 14, "turns": 7, "video-short": 5},
    {"text-long": 2, "multi_image-long": 11},
)
# Recipes that train thinker and talker, and a talker alone, by family.
RECIPES = {
    "qwen3_omni": {"joint": ("qwen3_omni_speech_sft",), "talker": ("qwen3_omni_talker_sft",)},
    "qwen25_omni": {"joint": ("qwen25_omni_sft", "train.speech_loss=0.5"), "talker": ("qwen25_omni_talker_sft",)},
}
FURTHER = {
    "recomputed": Parallel("CP2, all computed again", 2, ("parallel.cp=2", "engine.recompute=full")),
    "towers": Parallel("PP2, towers shared", 2, ("parallel.pp=2", "parallel.towers=shared")),
}
CASES = [pair for pair in product(PARALLEL, TALKERS) if pair not in REFUSED] + [
    (name, "qwen3_omni") for name in FURTHER
]


class Rows:
    """Spoken rows where ranks can read them, and what one rank makes of them one by one."""

    def __init__(self, folder: Path, family: str, recipe: str, *overrides: str) -> None:
        from zoo.model.build import assemble

        self.folder, self.recipe, self.overrides = folder, recipe, overrides
        if family == "qwen3_omni":
            sizes = {"num_hidden_layers": 4, "mlp_only_layers": [1], "num_experts": 6}
            self.checkpoint = write_tiny_talker(folder / "checkpoint", predictor={"num_key_value_heads": 2}, **sizes)
        else:
            self.checkpoint = write_tiny_qwen25_talker(folder / "checkpoint")
        self.speech = assemble(recipe_for(self.checkpoint, *overrides, recipe=recipe)).processor.speech
        examples = make_examples(
            assemble(recipe_for(self.checkpoint, recipe=f"{family}_sft")).processor
        )  # not spoken yet
        groups = [[self.said(examples[name].sample, *said) for name, said in group.items()] for group in numbered()]
        self.labels = sum(sample.label_weight for group in groups for sample in group)
        self.alone = self.stored("alone", [packed_batch([sample]) for group in groups for sample in group])
        self.packed = self.stored("packed", list(map(packed_batch, groups)))

    def said(self, sample: Any, number: int, frames: int) -> Any:
        from zoo.packing.spoken import WEIGHTS

        codes = torch.randint(CODES, (frames, len(self.speech.limits)), generator=torch.Generator().manual_seed(number))
        speaker, weight = sorted(self.speech.speakers.values())[number % 2], (1.0, 0.5)[number % 2]
        spoken, _ = self.speech.spoken(sample, speaker, codes)
        return replace(spoken, media={**spoken.media, WEIGHTS: torch.tensor([weight])}, code_weight=weight)

    def stored(self, name: str, batches: list[Batch]) -> str:
        path = self.folder / f"{name}.pickle"
        path.write_bytes(pickle.dumps(batches))
        return str(path)

    def plan(self, batches: str, *overrides: str) -> Plan:
        return Plan(
            folder=str(self.checkpoint), batches=batches, labels=self.labels, recipe=self.recipe,
            overrides=(*self.overrides, *overrides),
        )  # fmt: skip


def numbered() -> list[dict[str, tuple[int, int]]]:
    """GROUPS, with the number of each row before its frames."""
    numbers = iter(range(100))
    return [{name: (next(numbers), frames) for name, frames in group.items()} for group in GROUPS]


@pytest.fixture(scope="module")
def rows(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Rows, float, Any]]:
    @cache
    def made(family: str, trained: str) -> tuple[Rows, float, Any]:
        rows = Rows(tmp_path_factory.mktemp(f"{family}_{trained}"), family, *RECIPES[family][trained])
        held = pool.run(1, run_step, rows.plan(rows.alone), timeout=300.0)
        return rows, total_loss(held), full_gradients(held)

    return made


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["joint", "talker"])
@pytest.mark.parametrize(("parallel", "family"), CASES)
def test_ranks_equal_one(
    parallel: str, family: str, trained: str, pool: Pool, rows: Callable[..., Any],
    record_property: Callable[[str, object], None], measured: dict[tuple[str, str], float],
) -> None:  # fmt: skip
    made, loss, wanted = rows(family, trained)
    setting = (PARALLEL | FURTHER)[parallel]
    held = pool.run(setting.ranks, run_step, made.plan(made.packed, *setting.overrides), timeout=300.0)
    error, (largest, name) = abs(total_loss(held) - loss) / loss, worst(full_gradients(held), wanted)
    record_property("errors", f"loss {error:.1e}, gradients {largest:.1e} {name}")
    assert error < LIMIT
    assert largest < LIMIT, name
    measured[parallel, family] = max(largest, measured.get((parallel, family), 0.0))
    learning = {name.partition(".")[0] for name, gradient in wanted.items() if bool(gradient.any())}
    assert (
        learning == {"talker"}
        if trained == "talker"
        else learning > {"talker", "decoder", "embedding", "vision", "audio"}
    )
