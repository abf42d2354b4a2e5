"""Samples of `zoo bench train` for families without grids of patches: what transformers' model gets is what zoo's gets."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo.bench.training import hf
from zoo.bench.training import train as bench_train
from zoo.bench.training.rows import collate, examples
from zoo.bench.training.setting import Setting
from zoo.bench.training.steps import BenchRun
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.logging.startup_time import Startup
from zoo.model import build
from zoo.parallel.signals import Interrupts

LONGEST = 512
IMAGES = ("gemma3_sft", "gemma4_sft", "internvl_sft", "llava_sft", "llava_onevision_sft")
# Recipe -> a tensor of its media.
MEDIA = {"qwen3_sft": None, "qwen3_asr_sft": "input_features", **dict.fromkeys(IMAGES, "pixel_values")}


def tiny(name: str) -> Recipe:
    size = "tiny-onevision" if "onevision" in name else "tiny"
    options = bench_train.TrainBenchOptions(recipe=name, size=size, longest=LONGEST)
    return bench_train.bench_recipe(options, ["hardware=cpu", "engine.threads=1"])


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", MEDIA)
def test_rows_side_by_side_are_to_transformers_what_they_are_alone(name: str) -> None:
    recipe = tiny(name)
    assembly = build.assemble(recipe)
    made = examples(assembly, 3, LONGEST)
    again = examples(assembly, 3, LONGEST)[2].sample
    torch.testing.assert_close(made[2].sample.input_ids, again.input_ids, rtol=0, atol=0)
    model = hf._model(recipe, assembly.config.root, torch.device("cpu"), torch.float32).eval()
    batch = collate([one.features for one in made], LONGEST)
    lengths = [one.sample.length for one in made]
    assert max(lengths) <= LONGEST == batch["input_ids"].shape[1] and len(set(lengths)) > 1
    assert (MEDIA[name] is None) == (not made[0].sample.media) and MEDIA[name] in (None, *batch)
    with torch.no_grad():
        alone = [model(**one.features) for one in made]
        together = model(**batch)
    for one, found, length in zip(alone, together.logits, lengths, strict=True):
        torch.testing.assert_close(found[:length], one.logits[0], rtol=1e-4, atol=1e-5)
    counts = torch.tensor([one.sample.num_labels for one in made])
    assert counts[0] > 20
    mean = (torch.stack([one.loss for one in alone]) * counts).sum() / counts.sum()
    assert float(together.loss) == pytest.approx(float(mean), rel=1e-5)


@pytest.mark.slow
def test_a_medium_that_leaves_no_room_for_text_is_refused() -> None:
    assembly = build.assemble(tiny("llava_sft"))
    with pytest.raises(UserError, match=r"a sample of LLaVA.* has \d+ tokens with one of text .*; give longest="):
        examples(assembly, 1, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", MEDIA)
def test_zoo_and_transformers_train_on_the_same_samples(name: str, cpu_world: Any, tmp_path: Path) -> None:
    recipe = tiny(name)
    given = {"samples": 4, "passes": 1, "warm_steps": 4, "longest": LONGEST}
    given |= {"data": "", "routing": "router", "profile": False}
    row = {"packing.mode": "thd", "packing.budget": 4 * LONGEST, "train.global_batch": 1, "run.dir": str(tmp_path)}
    plain = hf.measure(recipe, given | {"setting": vars(Setting("hf", 2, backend="sdpa"))})
    request = given | {"setting": vars(Setting("packed", 2))}
    with closing(BenchRun(recipe.replace(row), cpu_world, Interrupts(), Startup("imports"), request)) as run:
        packed = run.measure()
    for same in ("real_tokens_per_step", "tflop_per_step", "samples_per_step"):
        assert packed[same] == plain[same], same
    # Of transformers: factors of layers, the tower's mean and spread.
    buffers = 4 + 2 * 64 if name == "gemma4_sft" else 0
    assert packed["parameters"] == plain["parameters"] + buffers
    assert packed["real_share"] == 1.0 > plain["real_share"]
    assert set(packed["tflop_per_step"]) > {"decoder", "head"} or name == "qwen3_sft"
    assert packed["loss"] > 0 and plain["loss"] > 0
