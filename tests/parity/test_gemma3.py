"""What is special to Gemma 3: sliding layers, images that see themselves both ways, crops, older keys."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import packed_batch, padded_batch
from support.families import FAMILIES, pair_of
from support.pairs import Pair, worst
from support.tiny_gemma3 import FULL, SLIDING, tiny_config

from zoo.models.gemma3.config import Gemma3Config

pair = pair_of("gemma3")


def test_rows_outgrow_the_window_and_an_image_does_not(pair: Pair) -> None:
    """One row has three images, of which two are cut to crops."""
    counts = {name: len(e.sample.media.get("pixel_values", ())) for name, e in pair.examples.items()}
    assert (counts["square"], counts["wide"], counts["three"]) == (1, 5, 9), "crops of long ones"
    window = pair.hf.config.text_config.sliding_window
    assert pair.hf.config.mm_tokens_per_image < window < min(e.length for e in pair.examples.values())


def images_alone(pair: Pair) -> tuple[Any, torch.Tensor]:
    """A sample that is an image's tokens and nothing else, and transformers' logits of it."""
    example = pair.examples["square"]
    image = example.sample.input_ids == pair.hf.config.image_token_id
    ids = example.sample.input_ids[image]
    with torch.no_grad():
        logits = pair.hf(
            input_ids=ids[None],
            pixel_values=example.features["pixel_values"],
            token_type_ids=torch.ones_like(ids)[None],
        ).logits[0]
    return replace(example.sample, input_ids=ids, labels=torch.full_like(ids, -100)), logits


@pytest.mark.parametrize("mode", ["thd", "none"])
def test_an_image_at_a_samples_end_does_not_see_that_at_the_next_ones_start(pair: Pair, mode: str) -> None:
    """Nor does a sample's last image see padding."""
    alone, wanted = images_alone(pair)
    text = pair.examples["text-short"]
    samples = [alone, alone, text.sample, alone]
    batch = packed_batch(samples) if mode == "thd" else padded_batch(samples, "mixed", extra=3)
    found = pair.zoo.logits(batch, mode=mode, align=4 if mode == "thd" else 1)
    want = [wanted, wanted, pair.logits[list(pair.examples).index("text-short")], wanted]
    assert worst(found, want) < pair.logits_limit


def test_an_image_sees_itself_both_ways(pair: Pair) -> None:
    """So that the tests above can see where it does not: transformers' own causal logits are others."""
    example = pair.examples["wide"]
    causal = {name: x for name, x in example.features.items() if name != "token_type_ids"}
    with torch.no_grad():
        other = pair.hf(**causal).logits[0]
    assert worst([other], [pair.logits[0]]) > 0.01


@pytest.mark.slow
def test_the_window_is_counted_within_a_segment(pair: Pair, tmp_path: Path, cpu_world: Any) -> None:
    """A longer window changes long rows alone, and is what transformers makes of it."""
    wider = FAMILIES["gemma3"].pair(tmp_path, cpu_world, sliding_window=20)
    found = wider.zoo.logits(packed_batch(wider.samples), align=4)
    assert worst(found, wider.logits) < pair.logits_limit
    names = list(pair.examples)
    short, long = names.index("text-short"), names.index("text-long")
    assert worst([wider.logits[long]], [pair.logits[long]]) > 0.01
    assert worst([wider.logits[short][:12]], [pair.logits[short][:12]]) < pair.logits_limit


def test_the_hub_has_older_keys() -> None:
    """`rope_theta`, `rope_local_base_freq`, `rope_scaling` and `sliding_window_pattern`, as the published files have them."""
    arch = tiny_config().to_dict()
    text = {key: value for key, value in arch["text_config"].items() if key not in ("rope_parameters", "layer_types")}
    text |= {"rope_theta": 50000.0, "rope_local_base_freq": 1000.0, "sliding_window_pattern": 2}
    text["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    found = Gemma3Config.from_arch({**arch, "text_config": text})
    wanted = Gemma3Config.from_arch(arch)
    assert (found.rotary, found.local_rotary) == (wanted.rotary, wanted.local_rotary)
    assert found.text.layer_types == [SLIDING, FULL, SLIDING, FULL, SLIDING]
