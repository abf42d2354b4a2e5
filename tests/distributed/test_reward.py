"""A reward model is trained, resumed and exported; transformers' ForSequenceClassification model gives its scores."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.matrix import MODELS
from support.pool import Pool
from support.preference import OF_MODELS, encoded_pairs, write_pairs


def scores_run(rank: int, size: int, recipe: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A run on this rank, and the scores that its step gives the pairs from its export."""
    from support.engine import recipe_for

    from zoo.config.compose import load_recipe
    from zoo.data.loading.batches import make_batch
    from zoo.engine.checkpoint import initial_weights
    from zoo.engine.distributed.world import world
    from zoo.engine.model import build
    from zoo.engine.train.evaluation import segment_logprobs
    from zoo.engine.train.trainer import train

    fixed = ["hardware=cpu", "engine.threads=1", "log.tensorboard=false"]
    made = load_recipe(recipe, [*fixed, *overrides])
    result = train(made)
    given = [one for one in overrides if not one.startswith(("model.init", "parallel"))]
    again = recipe_for(Path(made.run.dir) / "export", *given, recipe=recipe)
    if size > 1:
        return {"metrics": result.metrics}
    with world(again) as here:
        assembly = build.assemble(again)
        chunks = build.build_model(assembly, again, here)
        initial_weights.init_weights(chunks, assembly, again, here)
        _, found = encoded_pairs(assembly.processor, again)
        step = build.build_step(assembly, again, here)
        batch = make_batch([pair.sample for pair in found], "thd", again.packing.align or 1, None, 0)
        scores = segment_logprobs(step, [chunks[0].eval()], batch, here)
    halves = [features for pair in found for features, _ in pair.halves]
    return {"metrics": result.metrics, "scores": scores, "features": halves}


def classifier(name: str) -> Any:
    """transformers' class; where it has none, what its documentation has one write: the generic one of the same model."""
    from transformers import (
        AutoModelForSequenceClassification,
        LlavaOnevisionPreTrainedModel,
        Qwen3VLPreTrainedModel,
    )
    from transformers.modeling_layers import GenericForSequenceClassification

    if name in ("gdn", "text", "next"):
        return AutoModelForSequenceClassification
    base = {"dense": Qwen3VLPreTrainedModel, "llava": LlavaOnevisionPreTrainedModel}[name]
    return type("Classifier", (GenericForSequenceClassification, base), {"forward": forward})


def forward(self: Any, **features: Any) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(logits=self.score(self.model(**features).last_hidden_state)[:, -1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "gdn", "llava", "text", "next"])
def test_transformers_loads_an_exported_reward_model(name: str, pool: Pool, tmp_path: Path) -> None:
    model = MODELS[name]
    folder = model.write(tmp_path / "model")
    common = (
        *write_pairs(tmp_path / "pairs.jsonl", 4, OF_MODELS.get(name, ("image", "text"))), *model.overrides, f"model.init={folder}", "train.loss=reward",
        "train.global_batch=1", "train.lr=1e-3", "train.schedule=constant", "train.aux_loss=0", "packing.budget=1024",
        f"run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    pool.run(1, scores_run, model.recipe, (*common, "train.steps=2"), timeout=300.0)
    found = pool.run(1, scores_run, model.recipe, (*common, "train.steps=3"), timeout=300.0)[0]
    assert "exact_match" not in found["metrics"] and 0 <= found["metrics"]["rewards/accuracies"] <= 1
    config = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification")
    plain = {"experts_implementation": "eager"} if name in ("text", "next") else {}  # odd widths
    folder = tmp_path / "run" / "export"
    hf, info = classifier(name).from_pretrained(folder, output_loading_info=True, **plain)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    assert hf.config.num_labels == 1
    with torch.no_grad():
        wanted = torch.cat([hf.eval().float()(**features).logits.flatten() for features in found["features"]])
    if name == "dense":
        converted(tmp_path / "run", tmp_path / "run" / "export", tmp_path)
    assert float(wanted.std()) > 1e-3
    torch.testing.assert_close(found["scores"], wanted, rtol=1e-4, atol=1e-5)


def converted(run: Path, export: Path, to: Path) -> None:
    """A run and its export go to zoo's own weights and back, tensor for tensor; verbs of language models refuse both."""
    from safetensors.torch import load_file

    import zoo
    from zoo.errors import UserError

    zoo.convert(export, to / "own", quiet=True)
    zoo.convert(to / "own", to / "back", quiet=True)
    zoo.convert(run, to / "of_run", quiet=True)
    wanted = load_file(export / "model.safetensors")
    assert "score.weight" in wanted
    for folder in (to / "back", to / "of_run"):
        found = load_file(folder / "model.safetensors")
        assert found.keys() == wanted.keys() and all(
            torch.equal(found[name], wanted[name]) for name in wanted
        )
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"][0].endswith("ForSequenceClassification")
    for place in (run, export, to / "own"):
        for verb in (zoo.score, zoo.generate):
            with pytest.raises(UserError, match="it is a reward model"):
                verb(place, "digits:heldout")
