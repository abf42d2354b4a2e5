"""Vectors, their loss and every gradient are those of transformers; an exported folder gives them in transformers and sentence-transformers.

`pip install --no-deps --target FOLDER sentence-transformers`, and PYTHONPATH=FOLDER, for the last.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.engine import Zoo, recipe_for, single_process_world
from support.matrix import MODELS
from support.pairs import assert_hf_gradients
from support.preference import OF_MODELS
from support.retrieval import write_rows
from support.tiny import load_thinker
from torch import Tensor

from zoo.checkpoint.export import export
from zoo.data.digits import ROOT
from zoo.data.loading.batches import make_batch
from zoo.data.loading.pairs import conversations_of
from zoo.data.loading.sample_source import SampleSource
from zoo.errors import UserError
from zoo.model.embedding_files import stated_settings
from zoo.model.run_settings import FILE
from zoo.tools.evaluate import evaluate
from zoo.tools.score import score
from zoo.training.passes.retrieval import FirstPass, vectors_of

LIMIT = 5e-5  # relative, of gradients
INSTRUCTION = "Which digits are meant?"


def loaded(name: str, tmp_path: Path, world: Any, *more: str) -> tuple[Zoo, SampleSource, Path]:
    """A model of the matrix that embeds, its rows, and the language model's folder that it begins with."""
    model = MODELS[name]
    folder = model.write(tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", 3, OF_MODELS.get(name, ("image", "text", "video")))
    common = (*data, *model.overrides, f"embed.instruction={INSTRUCTION}", "packing.align=4", *more)
    recipe = recipe_for(folder, *common, recipe=model.recipe)
    zoo = Zoo.from_recipe(recipe, world)
    settings = {"budget": 8192, "align": 4, "embed": recipe.embed}
    return zoo, SampleSource.open(recipe.data.train, zoo.assembly.processor, recipe.data, **settings), folder


def hf_vectors(hf: Any, zoo: Zoo, source: SampleSource, pooling: str) -> Tensor:
    """(S, hidden) by transformers, each conversation by itself; its tokens are those of zoo's samples."""
    vectors = []
    for number in range(len(source)):
        sample, row = source.encode(number), source._row(number)
        for part, segment in zip(conversations_of(row, zoo.recipe.embed), sample.segments, strict=True):
            _, features = zoo.assembly.processor.encode_both(part, video_fps=2.0, max_frames=768)
            torch.testing.assert_close(features["input_ids"][0], segment.input_ids, rtol=0, atol=0)
            states = hf.model(**features).last_hidden_state[0]
            vectors.append(states[-1] if pooling == "last" else states.mean(dim=0))
    return torch.stack(vectors)


def plain_loss(vectors: Tensor, source: SampleSource, temperature: float, sizes: tuple[int, ...]) -> Tensor:
    """The mean over queries by the paper's formula; no two queries or candidates of these rows are alike."""
    counts = [len(source.encode(number).segments) for number in range(len(source))]
    starts = torch.tensor([0, *counts[:-1]]).cumsum(0)
    others = torch.tensor([n for n in range(len(vectors)) if n not in starts])
    total = vectors.new_zeros(())
    for size in sizes:
        cosines = F.cosine_similarity(vectors[starts, None, :size], vectors[None, others, :size], dim=-1)
        wanted = torch.tensor([int((others == start + 1).nonzero()) for start in starts])
        total = total + F.cross_entropy(cosines / temperature, wanted) / len(sizes)
    return total


@pytest.mark.parametrize(
    ("name", "pooling"),
    [
        ("dense", "last"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("dense", "mean"), ("moe", "last"), ("text", "mean"))
        ),
        *(
            pytest.param(name, "last", marks=pytest.mark.slow)
            for name in ("omni", "llava", "two-way", "capped", "sound")
        ),
    ],
)
def test_loss_and_gradients_are_those_of_transformers(name: str, pooling: str, tmp_path: Path) -> None:
    """However the rows are dealt out to micro-batches, packed and padded."""
    with single_process_world() as world:
        keys = (f"embed.pooling={pooling}", "embed.temperature=0.3", "embed.dimensions=[16, 40]")
        zoo, source, folder = loaded(name, tmp_path, world, *keys)
        hf = load_thinker(folder)
        vectors = hf_vectors(hf, zoo, source, pooling)
        wanted = plain_loss(vectors, source, 0.3, (16, 40))
        wanted.backward()
        samples = [source.encode(number) for number in range(len(source))]
        for packing, parts in (({"align": 4}, (1, 2)), ({"align": 4, "mode": "none"}, (len(samples),))):
            batches, rest = [], samples
            for count in (*parts, len(samples) - sum(parts)):
                batches += [make_batch(rest[:count], "thd", 4, None, 0)] if rest[:count] else []
                rest = rest[count:]
            completed = FirstPass(zoo.step(**packing), [zoo.model], world)(batches)
            found = torch.cat([vectors_of(zoo.step(**packing), [zoo.model], batch, world) for batch in batches])
            torch.testing.assert_close(found, vectors.detach(), rtol=1e-4, atol=1e-5)
            _, gradients = zoo.gradients(completed, len(samples), **packing)
            losses = torch.cat([batch.vectors.losses for batch in completed])
            assert float(losses.mean()) == pytest.approx(float(wanted.detach()), rel=1e-5)
            assert_hf_gradients(zoo, gradients, hf, MODELS[name].publish, LIMIT)


def exported(zoo: Zoo, world: Any, target: Path) -> Path:
    return export([zoo.model], target, zoo.assembly, world, zoo.assembly.source, overwrite="aside")


def vectors_of_rows(zoo: Zoo, source: SampleSource, world: Any) -> Tensor:
    """(S, hidden) unit vectors by zoo, of all rows in one pack."""
    batch = make_batch([source.encode(number) for number in range(len(source))], "thd", 4, None, 0)
    return F.normalize(vectors_of(zoo.step(), [zoo.model], batch, world), dim=-1)


@pytest.mark.parametrize("name", ["text", pytest.param("dense", marks=pytest.mark.slow)])
def test_an_export_has_no_head_and_loads_again(name: str, tmp_path: Path) -> None:
    """In transformers without a missing tensor, under the names of AutoModel too, and in zoo."""
    from transformers import AutoModel

    with single_process_world() as world:
        zoo, source, _ = loaded(name, tmp_path, world)
        folder = exported(zoo, world, tmp_path / "export")
        wanted = vectors_of_rows(zoo, source, world)
        kinds = {"dtype": torch.float32, "experts_implementation": "eager"}
        body, report = AutoModel.from_pretrained(folder, output_loading_info=True, **kinds)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        body.save_pretrained(tmp_path / "bare")  # names without the prefix `model.`
        for file in folder.iterdir():
            if not (tmp_path / "bare" / file.name).exists() and file.is_file() and "safetensors" not in file.name:
                (tmp_path / "bare" / file.name).write_bytes(file.read_bytes())
        for again in (folder, tmp_path / "bare"):
            recipe = zoo.recipe.replace({"model.init": str(again)})
            other = Zoo.from_recipe(recipe, world)
            torch.testing.assert_close(vectors_of_rows(other, source, world), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("name", ["text", "dense"])
@pytest.mark.slow
def test_sentence_transformers_reads_an_export(name: str, pooling: str, tmp_path: Path) -> None:
    """Vectors of queries with their instruction, of texts and of images are zoo's."""
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from PIL import Image

    with single_process_world() as world:
        zoo, source, _ = loaded(name, tmp_path, world, f"embed.pooling={pooling}")
        folder = exported(zoo, world, tmp_path / "export")
        wanted = iter(vectors_of_rows(zoo, source, world))
        model = library.SentenceTransformer(
            str(folder), device="cpu", model_kwargs={"dtype": torch.float32, "experts_implementation": "eager"}
        )
        encode = partial(model.encode, convert_to_tensor=True)
        compared = 0
        for line in (tmp_path / "rows.jsonl").read_text().splitlines():
            row = json.loads(line)
            if "instruction" in row:
                query = encode(row["query"], prompt=model.prompts["query"].replace(INSTRUCTION, row["instruction"]))
            else:
                query = encode(row["query"], prompt_name="query")
            torch.testing.assert_close(query, next(wanted), rtol=0, atol=1e-5)
            for part in (row["positive"], *row.get("negatives", ())):
                vector = next(wanted)
                if isinstance(part, dict) and "images" not in part:  # videos are sampled by its own rules
                    continue
                part = part if isinstance(part, str) else Image.open(ROOT / part["images"][0]).convert("RGB")
                torch.testing.assert_close(encode(part), vector, rtol=0, atol=1e-5)
                compared += 1
        assert compared > 3


@pytest.mark.parametrize("pooling", ["mean", pytest.param("last", marks=pytest.mark.slow)])
def test_an_evaluation_ranks_by_a_folders_vectors(pooling: str, tmp_path: Path) -> None:
    """An export with zoo's settings, and one that has the files of sentence-transformers alone, as published folders have."""
    with single_process_world() as world:
        zoo, source, _ = loaded("text", tmp_path, world, f"embed.pooling={pooling}")
        folder, vectors = exported(zoo, world, tmp_path / "export"), vectors_of_rows(zoo, source, world)
    counts = [len(source.encode(number).segments) for number in range(len(source))]
    starts = torch.tensor([0, *counts[:-1]]).cumsum(0)
    candidates = torch.tensor([n for n in range(len(vectors)) if n not in starts])
    nearest = candidates[(vectors[starts] @ vectors[candidates].T).argsort(dim=1, descending=True)]
    places = (nearest == starts[:, None] + 1).nonzero()[:, 1]
    for _ in range(2):
        found = evaluate(folder, str(tmp_path / "rows.jsonl"), [f"data.root={ROOT}"], in_process=True)
        assert found.rows == len(starts) and len(found.predictions) == len(starts)
        assert found.scores["recall@1"] == pytest.approx(float((places < 1).float().mean()))
        assert found.scores["ndcg@10"] == pytest.approx(
            float((1 / (places + 2.0).log2() * (places < 10)).mean()), rel=1e-5
        )
        (folder / FILE).unlink(missing_ok=True)
    with pytest.raises(UserError, match="it is an embedding model"):
        score(folder, str(tmp_path / "rows.jsonl"), in_process=True)


def test_an_unknown_pooling_is_named(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "modules.json").write_text('[{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]')
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    with pytest.raises(UserError, match="it pools by cls_token; wanted one of lasttoken, mean_tokens"):
        stated_settings(tmp_path)
