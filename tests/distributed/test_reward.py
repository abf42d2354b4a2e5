"""A reward model is trained, resumed and exported; transformers' ForSequenceClassification model gives its scores."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import recipe_for, single_process_world
from support.matrix import MODELS, PARALLEL
from support.pool import Pool
from support.preference import OF_MODELS, classifier, encoded_pairs, pair_run, write_pairs

from zoo.model.build import assemble


def scores_run(rank: int, size: int, recipe: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A run on this rank, and the scores that its step gives the pairs from its export."""
    from support.engine import load_model, recipe_for
    from support.recipes import load_effective

    from zoo.data.loading.batches import make_batch
    from zoo.model import build
    from zoo.parallel.world import open_world
    from zoo.training.evaluation import segment_logprobs
    from zoo.training.trainer import run_rank

    fixed = ["hardware=cpu", "engine.threads=1", "log.tensorboard=false"]
    made = load_effective(recipe, [*fixed, *overrides])
    result = run_rank(made)
    given = [one for one in overrides if not one.startswith(("model.init", "parallel"))]
    again = recipe_for(Path(made.run.dir) / "export", *given, recipe=recipe)
    if size > 1:
        return {"metrics": result.metrics}
    with open_world(again) as here:
        assembly, chunks = load_model(again, here)
        _, found = encoded_pairs(assembly.processor, again)
        step = build.build_step(assembly, again, here)
        batch = make_batch([pair.sample for pair in found], "thd", again.packing.align or 1, None, 0)
        scores = segment_logprobs(step, [chunks[0].eval()], batch, here)
    halves = [features for pair in found for features, _ in pair.halves]
    return {"metrics": result.metrics, "scores": scores, "features": halves}


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
        assert found.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=0)
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"][0].endswith("ForSequenceClassification")
    for place in (run, export, to / "own"):
        for verb in (zoo.score, zoo.generate):
            with pytest.raises(UserError, match="it is a reward model"):
                verb(place, "digits:heldout")


LORA = (
    "lora.rank=3",
    "lora.parts=[vision,language]",
    "train.lr=2e-2",
    "train.schedule=constant",
    "packing.align=8",
    "train.aux_loss=0",
)
LAYOUTS = [("tp2", "dense"), ("pp2", "gdn"), ("tp2 sp", "text"), ("cp2 ep2", "omni")]


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "name"), LAYOUTS)
def test_adapters_and_the_head_are_trained_under_every_layout(
    parallel: str, name: str, pool: Pool, tmp_path: Path
) -> None:
    """As on one rank, resumed under another layout too; peft has the scores of the run's last evaluation."""
    from safetensors.torch import load_file

    model, setting = MODELS[name], PARALLEL[parallel]
    folder = model.write(tmp_path / "model")
    parts = () if name in ("dense", "gdn") else ("lora.parts=[language]",)
    common = (
        *write_pairs(tmp_path / "pairs.jsonl", 5, OF_MODELS.get(name, ("image", "text"))), *model.overrides, *LORA, *parts,
        f"model.init={folder}", "train.loss=reward", "train.global_batch=2", "packing.budget=1024", "data.lookahead=4", "export=true",
    )  # fmt: skip
    runs, other = {}, (setting.ranks, setting.overrides)
    for case, plan in {
        "alone": [(3, 1, ())], "spread": [(3, *other)], "there": [(2, 1, ()), (3, *other)], "back": [(2, *other), (3, 1, ())],
    }.items():  # fmt: skip
        for steps, ranks, more in plan:
            given = (*common, *more, f"train.steps={steps}", f"run.dir={tmp_path / case}")
            runs[case] = pool.run(ranks, pair_run, model.recipe, given, timeout=300.0)[0]
    last = {case: (found[-2], found[-1]) for case, found in runs.items()}  # the third step, and the evaluation
    files = {case: load_file(tmp_path / case / "export" / "adapter_model.safetensors") for case in runs}
    for case in ("spread", "there", "back"):
        for one, wanted in zip(last[case], last["alone"], strict=True):
            for key in ("loss", "grad_norm", "rewards/chosen", "rewards/rejected"):
                if key in wanted:
                    assert one[key] == pytest.approx(wanted[key], rel=3e-4, abs=3e-5), (case, key)
        assert files[case].keys() == files["alone"].keys()
        for key, tensor in files["alone"].items():
            assert float((files[case][key] - tensor).norm()) < 2e-3 * float(tensor.norm()) + 1e-5, (case, key)
    (head,) = (key for key in files["alone"] if ".lora_" not in key)
    assert head == "base_model.model.score.weight"
    if name != "omni":  # whose thinker has no such class
        as_peft_has_it(name, folder, tmp_path, last["spread"][1])


def as_peft_has_it(name: str, folder: Path, root: Path, evaluation: dict[str, Any]) -> None:
    """peft on transformers' classifier, and the merged weights in it, give the scores of the evaluation."""
    import peft

    import zoo

    zoo.convert(root / "spread", root / "merged", quiet=True)
    plain = {"experts_implementation": "eager"} if name in ("text", "next") else {}
    base = classifier(name).from_pretrained(folder, num_labels=1, dtype=torch.float32, **plain)
    adapted = peft.PeftModel.from_pretrained(base, root / "spread" / "export").eval().base_model.model
    merged = classifier(name).from_pretrained(root / "merged", dtype=torch.float32, **plain).eval()
    with single_process_world():
        recipe = recipe_for(
            folder,
            *write_pairs(root / "pairs.jsonl", 5, OF_MODELS.get(name, ("image", "text"))),
            "train.loss=reward",
            recipe=MODELS[name].recipe,
        )
        _, found = encoded_pairs(assemble(recipe).processor, recipe)
    for hf in (adapted, merged):
        with torch.no_grad():
            halves = [features for pair in found for features, _ in pair.halves]
            scores = torch.cat([hf(**features).logits.flatten() for features in halves])
        means = [float(half.mean()) for half in scores.view(-1, 2).T]
        wanted = [evaluation["rewards/chosen"], evaluation["rewards/rejected"]]
        assert means == pytest.approx(wanted, rel=2e-4, abs=2e-5)
        assert abs(means[0] - means[1]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [(), ("lora.rank=2",)], ids=["weights", "adapters"])
def test_a_reward_model_starts_from_a_language_models_run(
    adapters: tuple[str, ...], pool: Pool, tmp_path: Path
) -> None:
    """From a run's checkpoint as from the folder that it converts to; under adapters of its own, too."""
    import zoo

    model = MODELS["text"]
    folder = model.write(tmp_path / "model")
    common = (
        *write_pairs(tmp_path / "pairs.jsonl", 3, ("text",)), *model.overrides, "train.steps=1", "train.global_batch=3",
        "train.lr=1e-2", "train.schedule=constant", "packing.budget=1024",
    )  # fmt: skip
    first = (*common, *adapters, f"model.init={folder}", f"run.dir={tmp_path / 'first'}")
    pool.run(1, pair_run, model.recipe, first, timeout=300.0)
    zoo.convert(tmp_path / "first", tmp_path / "converted", quiet=True)
    found = {}
    for name, more in {"run": ("first", ()), "folder": ("converted", ()), "again": ("first", ("lora.rank=2",))}.items():
        given = (f"model.init={tmp_path / more[0]}", f"run.dir={tmp_path / name}", *more[1])
        found[name] = pool.run(1, pair_run, model.recipe, (*common, "train.loss=reward", *given), timeout=300.0)[0]
    for name in ("run", "again"):
        for key in ("loss", "rewards/chosen", "rewards/rejected"):
            assert found[name][0][key] == pytest.approx(found["folder"][0][key], rel=1e-5, abs=1e-6), (name, key)
    assert found["run"][0]["loss"] != pytest.approx(0.6931, abs=1e-4)
