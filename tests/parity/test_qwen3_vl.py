"""What is special to Qwen3-VL: deepstack, and where its config says that embeddings are tied."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import packed_batch
from support.families import FAMILIES, pair_of
from support.pairs import Pair, worst

pair = pair_of("qwen3_vl", "qwen3_vl experts")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "deepstack", [(), (4,), (3, 0), (0, 1, 2, 3, 4)], ids=["none", "last", "backwards", "a layer each"]
)
def test_deepstack_from_other_layers(deepstack: tuple[int, ...], moe: bool, tmp_path: Path, cpu_world: Any) -> None:
    pair = FAMILIES["qwen3_vl"].pair(tmp_path, cpu_world, moe=moe, deepstack=deepstack)
    loss, gradients = pair.zoo.gradients([packed_batch(pair.samples)], pair.count)
    assert worst(pair.zoo.logits(packed_batch(pair.samples)), pair.logits) < 2 * pair.logits_limit
    assert loss == pytest.approx(pair.wanted[0], rel=1e-6)
    errors = pair.errors(gradients)
    assert sum(".deepstack_merger_list." in name for name in errors) == 6 * len(deepstack)
    assert max(errors.values()) < 2 * pair.gradients_limit


def test_each_deepstack_feature_changes_the_logits_of_its_row_alone(pair: Pair) -> None:
    """So that the tests above can see a feature that is lost, or that lands in another sample."""
    names = ("image-short", "text-short", "video-short")
    samples = [pair.examples[name].sample for name in names]
    before = pair.zoo.logits(packed_batch(samples))
    for merger in pair.zoo.model.vision.deepstack_merger_list:
        bias = merger.linear_fc2.bias
        kept = bias.detach().clone()
        with torch.no_grad():
            bias += 1.0
            image, text, video = (
                float((a - b).abs().max()) for a, b in zip(pair.zoo.logits(packed_batch(samples)), before, strict=True)
            )
            bias.copy_(kept)
        assert image > 0.1 and video > 0.1 and text < 1e-5


@pytest.mark.sampled(3)
@pytest.mark.parametrize("inside", [True, False, None])
def test_the_top_level_says_whether_embeddings_are_tied(inside: bool | None, tmp_path: Path, cpu_world: Any) -> None:
    pair = FAMILIES["qwen3_vl"].pair(tmp_path, cpu_world, tie_word_embeddings=inside)
    assert not pair.zoo.assembly.config.tied
    assert worst(pair.zoo.logits(packed_batch(pair.samples)), pair.logits) < pair.logits_limit
