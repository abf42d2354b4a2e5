"""A reference model's log-probabilities of all preference pairs: of the weights that a run begins with, or of another model.

One pass over data.train and data.eval before the first step computes them, so no second model is ever in memory. They are
kept in the run folder with a digest of what they follow from; a resumed run reads them, or computes them again. A run of
the same rows may read another run's. (`zoo.training.passes.auxiliary_passes` computes them in each step.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from zoo.checkpoint import initial_weights
from zoo.config.schema import Recipe
from zoo.data.loading.sample_source import SampleSource
from zoo.data.sources.mixture import SampleId
from zoo.errors import UserError
from zoo.files import expanded, replaced
from zoo.logging import terminal
from zoo.model import build
from zoo.model.build import Assembly
from zoo.model.objective import preference_loss
from zoo.parallel.object_group import agreed
from zoo.parallel.world import World
from zoo.steps.packed_step import PackedStep
from zoo.training.dataloader import RunData
from zoo.training.evaluation import compared_logprobs, in_eval_mode, recipe_batches
from zoo.training.resume import KnownRows

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

FILE, SUFFIX = "reference.safetensors", ".safetensors"
START, BASE = "start", "base"  # train.reference, where it is no path
DATA = (
    "train", "eval", "labels", "template", "literal_tags", "special_tokens", "augment", "augment_variants", "bundled", "video_fps", "max_frames", "min_pixels", "max_pixels",
    "video_max_pixels",
)  # fmt: skip
WEIGHTS = ("family", "init", "arch")


class Reference:
    """The log-probabilities of a run's pairs, by the part of the data (train, eval)."""

    def __init__(
        self, recipe: Recipe, assembly: Assembly, world: World, file: Path, *, other_model: bool, users_file: bool
    ) -> None:
        """`recipe` and `assembly` are those of the reference model, and `file` holds the log-probabilities, or will.

        `other_model`: it is not the model that the run begins with; `users_file`: the recipe names the file; else it is the run's own.
        """
        self.recipe, self.assembly, self.world, self.file = recipe, assembly, world, file
        self.other_model, self.users_file = other_model, users_file
        self.weights = weights_identity(recipe, assembly)
        self.logprobs: dict[str, np.ndarray] = {}

    @classmethod
    def from_recipe(cls, recipe: Recipe, assembly: Assembly, world: World, folder: Path) -> Reference | None:
        """The reference of a run in `folder`; None where its loss has no reference, or one that each step computes.

        Raises:
            UserError: `train.reference` names nothing that holds weights, or those of a model with fewer tokens.
        """
        loss, source = preference_loss(recipe), recipe.train.reference
        if loss is None or not loss.referenced or source == BASE:
            return None
        if source.endswith(SUFFIX):
            return cls(recipe, assembly, world, expanded(source), other_model=False, users_file=True)
        other = source != START
        if other:
            tokens = assembly.config.text.vocab_size
            recipe, assembly = build.assemble_other(recipe, "train.reference", tokens, world, larger=True)
        return cls(recipe, assembly, world, folder / FILE, other_model=other, users_file=False)

    def read(self, data: RunData, rows: KnownRows, tick: Callable[[], None]) -> bool:
        """Read what an earlier start has computed; False where there is nothing, or it follows from other rows or weights.

        Log-probabilities of another model than the run's are computed here. Every rank calls it.

        Args:
            rows: digests of the rows, known on the first rank.

        Raises:
            UserError: a stream, which can't be gone through beforehand, or a given file that is not of these rows.
        """
        if data.source.rows.has_stream:
            raise UserError(
                f"train.loss={self.recipe.train.loss}: a stream of data.train can't be gone through beforehand for the reference's "
                "log-probabilities; read it as a table, compute them in each step with adapters and train.reference=base, or take "
                "train.loss=simpo or orpo, which have no reference"
            )
        settings = {name: getattr(self.recipe.data, name) for name in DATA}
        by_kind = {"digest": self.weights, "rows": []}
        self.digests = {kind: plain_digest([settings, weights, rows.known]) for kind, weights in by_kind.items()}
        sizes = {name: _size(source) for name, source in _sources(data).items()}
        self.logprobs = agreed(lambda: self._read(sizes))
        if self.users_file and not self.logprobs:
            raise UserError(
                f"train.reference={self.file}: no file of log-probabilities of these rows under these settings of data; wanted the "
                f"{FILE} of a run on the same data.train and data.eval"
            )
        if self.other_model and not self.logprobs:  # which is in memory for as long
            chunks = initial_weights.load_frozen(self.assembly, self.recipe, self.world)
            self.compute(data, build.build_step(self.assembly, self.recipe, self.world), chunks, tick)
        return bool(self.logprobs)

    def compute(
        self, data: RunData, step: PackedStep, chunks: Sequence[MegatronModule], tick: Callable[[], None]
    ) -> None:
        """Compute them with the present weights, and write the file. Every rank calls it."""
        with in_eval_mode(chunks):
            for name, source in _sources(data).items():
                batches = recipe_batches(self.recipe, source, self.world, every_variant=True)
                local_logprobs: dict[SampleId, list[float]] = {}
                for number, (ids, batch) in enumerate(zip(batches.bins, batches, strict=True)):
                    values = compared_logprobs(step, chunks, batches.filler() if batch is None else batch, self.world)
                    tick()
                    terminal.detail(f"{number + 1} of {len(batches)} packed rows of data.{name}")
                    if batch is not None and values is not None:
                        local_logprobs |= dict(zip(ids, values.view(-1, 2).tolist(), strict=True))
                everyone: list[dict[SampleId, list[float]]] = [local_logprobs]
                if self.world.size > 1:
                    everyone = [{} for _ in range(self.world.size)]
                    dist.all_gather_object(everyone, local_logprobs)
                self.logprobs[name] = np.full((_size(source), 2), np.nan, np.float32)  # nan: of rows that can't be used
                for sample_id, pair in (item for of_rank in everyone for item in of_rank.items()):
                    self.logprobs[name][sample_id] = pair
        if self.world.is_main:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with replaced(self.file) as path:
                save_file(self.logprobs, path, metadata=self.digests)

    def give(self, data: RunData) -> None:
        """Have the samples of the data bring their log-probabilities."""
        for name, source in _sources(data).items():
            source.references = self.logprobs[name]

    def _read(self, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        """On the first rank: the file's arrays, {} where there are none or they don't fit."""
        key = "rows" if self.users_file else "digest"
        try:
            with safe_open(self.file, framework="numpy") as file:
                if (file.metadata() or {}).get(key) != self.digests[key]:
                    return {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no mapping
        except (SafetensorError, OSError):  # none, or damaged: they are computed again
            return {}
        shapes = {name: array.shape for name, array in arrays.items()}
        return arrays if shapes == {name: (size, 2) for name, size in sizes.items()} else {}


def _sources(data: RunData) -> dict[str, SampleSource]:
    return {"train": data.source} | ({} if data.held_out is None else {"eval": data.held_out})


def _size(source: SampleSource) -> int:
    return source.variants * len(source)


def weights_identity(recipe: Recipe, assembly: Assembly) -> list[object]:
    """What the first weights follow from: keys, and names, sizes and times of the files."""
    source = assembly.source
    files = [] if source is None else sorted({*source.folder.glob("*"), *source.weights.glob("*")})
    seen = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    named = {name: getattr(recipe.model, name) for name in WEIGHTS}
    return [named, asdict(recipe.lora), recipe.run.seed, recipe.engine.precision, recipe.engine.fp8, seen]


def plain_digest(values: object) -> str:
    """A digest of plain values, in hexadecimal."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
