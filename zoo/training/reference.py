"""A reference model's log-probabilities of all preference pairs: of the weights that a run begins with, or of another model.

One pass over data.train and data.eval before the first step computes them, so no second model is ever in memory. They are
kept in the run folder with a digest of what they follow from; a resumed run reads them, or computes them anew. A run of
the same rows may read another run's. (`zoo.training.auxiliary_passes` computes them in each step.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
from zoo.model.build import Assembly, preference_loss
from zoo.parallel.object_group import agreed
from zoo.parallel.world import World
from zoo.training.dataloader import RunData
from zoo.training.evaluation import compared_logprobs, in_eval_mode, recipe_batches
from zoo.training.resume import KnownRows

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
        self, recipe: Recipe, assembly: Assembly, world: World, file: Path, *, other: bool, given: bool
    ) -> None:
        """`recipe` and `assembly`: of the reference model, which is an`other` one than the run's; the file is `given`, or the run's own."""
        self.recipe, self.assembly, self.world, self.file = recipe, assembly, world, file
        self.other, self.given = other, given
        self.weights = weights_identity(recipe, assembly)
        self.found: dict[str, np.ndarray] = {}

    @classmethod
    def of_run(cls, recipe: Recipe, assembly: Assembly, world: World, folder: Path) -> Reference | None:
        """The reference of a run in `folder`; None where its loss has no reference, or one that each step computes.

        Raises:
            UserError: `train.reference` names nothing that holds weights, or those of a model with fewer tokens.
        """
        loss, source = preference_loss(recipe), recipe.train.reference
        if loss is None or not loss.referenced or source == BASE:
            return None
        if source.endswith(SUFFIX):
            return cls(recipe, assembly, world, expanded(source), other=False, given=True)
        other = source != START
        if other:
            recipe = build.with_other_model(recipe, source, world)
            ours, assembly = assembly, build.assemble(recipe)
            sizes = [one.config.text.vocab_size for one in (ours, assembly)]
            if sizes[1] < sizes[0]:
                raise UserError(
                    f"train.reference={source}: an embedding of {sizes[1]:,} rows, and the model's has {sizes[0]:,}; wanted a reference of the "
                    "same tokens, or train.reference=start"
                )
        return cls(recipe, assembly, world, folder / FILE, other=other, given=False)

    def read(self, data: RunData, rows: KnownRows, tick: Callable[[], None]) -> bool:
        """Take what an earlier start has computed; False where there is nothing, or it follows from other rows or weights.

        Those of another model than the run's are computed here. `rows`: how rows are recognised, known on the first rank. Every rank calls it.

        Raises:
            UserError: a stream, which can't be gone through beforehand, or a given file that is not of these rows.
        """
        if data.source.rows.has_stream:
            raise UserError(
                f"train.loss={self.recipe.train.loss}: a stream of data.train can't be gone through beforehand for the reference's "
                "log-probabilities; read it as a table, compute them in each step with adapters and train.reference=base, or take "
                "train.loss=simpo or orpo, which have no reference"
            )
        self.digests = {
            "digest": _digest(self.recipe, self.weights, rows.known),
            "rows": _digest(self.recipe, [], rows.known),
        }
        sizes = {name: _size(source) for name, source in _sources(data).items()}
        self.found = agreed(lambda: self._read(sizes))
        if self.given and not self.found:
            raise UserError(
                f"train.reference={self.file}: no file of log-probabilities of these rows under these settings of data; wanted the "
                f"{FILE} of a run on the same data.train and data.eval"
            )
        if self.other and not self.found:
            self._compute_apart(data, tick)
        return bool(self.found)

    def _compute_apart(self, data: RunData, tick: Callable[[], None]) -> None:
        """Compute them with the other model, which is in memory for as long."""
        chunks = build.build_model(self.assembly, self.recipe, self.world)
        initial_weights.init_weights(chunks, self.assembly, self.recipe, self.world)
        self.compute(data, build.build_step(self.assembly, self.recipe, self.world), chunks, tick)

    def compute(self, data: RunData, step: Any, chunks: Sequence[Any], tick: Callable[[], None]) -> None:
        """Compute them with the weights at hand, and write the file. Every rank calls it."""
        with in_eval_mode(chunks):
            for name, source in _sources(data).items():
                batches = recipe_batches(self.recipe, source, self.world, every_variant=True)
                mine: dict[SampleId, list[float]] = {}
                for number, (ids, batch) in enumerate(zip(batches.bins, batches, strict=True)):
                    given = batches.spare() if batch is None else batch
                    values = compared_logprobs(step, chunks, given, self.world)
                    tick()
                    terminal.detail(f"{number + 1} of {len(batches)} packed rows of data.{name}")
                    if batch is not None and values is not None:
                        mine |= dict(zip(ids, values.view(-1, 2).tolist(), strict=True))
                self.found[name] = self._gathered(mine, _size(source))
        if self.world.is_main:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with replaced(self.file) as path:
                save_file(self.found, path, metadata=self.digests)

    def give(self, data: RunData) -> None:
        """Have the samples of the data bring theirs."""
        for name, source in _sources(data).items():
            source.references = self.found[name]

    def _gathered(self, mine: dict[SampleId, list[float]], size: int) -> np.ndarray:
        everyone: list[dict[SampleId, list[float]]] = [mine]
        if self.world.size > 1:
            everyone = [{} for _ in range(self.world.size)]
            dist.all_gather_object(everyone, mine)
        values = np.full((size, 2), np.nan, np.float32)  # of rows that can't be used
        for one in everyone:
            for sample_id, pair in one.items():
                values[sample_id] = pair
        return values

    def _read(self, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        """On the first rank: the file's arrays, {} where there are none or they don't fit."""
        if not self.file.is_file():
            return {}
        try:
            with safe_open(self.file, framework="numpy") as file:
                key = "rows" if self.given else "digest"
                if (file.metadata() or {}).get(key) != self.digests[key]:
                    return {}
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no mapping
        except (SafetensorError, OSError):  # damaged: they are computed anew
            return {}
        fits = {name: value.shape for name, value in found.items()} == {name: (size, 2) for name, size in sizes.items()}
        return found if fits else {}


def _sources(data: RunData) -> dict[str, SampleSource]:
    return {"train": data.source} | ({} if data.held_out is None else {"eval": data.held_out})


def _size(source: SampleSource) -> int:
    return source.variants * len(source)


def weights_identity(recipe: Recipe, assembly: Assembly) -> list[Any]:
    """What the first weights follow from: keys, and names, sizes and times of the files."""
    place = assembly.source
    files = [] if place is None else sorted({*place.folder.glob("*"), *place.weights.glob("*")})
    seen = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    named = {name: getattr(recipe.model, name) for name in WEIGHTS}
    return [named, asdict(recipe.lora), recipe.run.seed, recipe.engine.precision, recipe.engine.fp8, seen]


def _digest(recipe: Recipe, weights: list[Any], rows: Mapping[str, Any]) -> str:
    settings = {name: getattr(recipe.data, name) for name in DATA}
    return plain_digest([settings, weights, rows])


def plain_digest(values: Any) -> str:
    """A digest of plain values, in hexadecimal."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
