"""What is special to Qwen2.5-VL: windows of its tower, the clock of a video, older keys."""

import copy
from pathlib import Path
from typing import Any

import torch
from support.engine import packed_batch
from support.families import FAMILIES, pair_of
from support.pairs import Pair, worst
from support.tiny_qwen25_vl import tiny_config, write_tiny_qwen25_vl

from zoo.models.qwen25_vl.config import Qwen25VLConfig

pair = pair_of("qwen25_vl")


def test_windows_are_those_of_the_config(pair: Pair, tmp_path: Path, cpu_world: Any) -> None:
    """So that the tests above can see a window that is lost, also one that an image's edge cuts short."""
    other = FAMILIES["qwen25_vl"].zoo(write_tiny_qwen25_vl(tmp_path, vision={"window_size": 96}), cpu_world)
    names = ("image-long", "turns", "text-short")
    batch = packed_batch([pair.examples[name].sample for name in names])
    long, turns, text = (worst([a], [b]) for a, b in zip(other.logits(batch), pair.zoo.logits(batch), strict=True))
    assert long > 0.01 and turns > 0.01 and text < 1e-5


def test_the_clock_of_a_video_moves_its_frames(pair: Pair) -> None:
    sample = pair.examples["video-long"].sample
    before = copy.copy(sample.media)
    wanted = pair.zoo.logits(packed_batch([sample]))
    try:
        sample.media["second_per_grid_ts"] = torch.tensor([2.0])
        assert worst(pair.zoo.logits(packed_batch([sample])), wanted) > 0.01
        del sample.media["second_per_grid_ts"]  # a foreign loop's batch: a temporal patch a second
        assert worst(pair.zoo.logits(packed_batch([sample])), wanted) == 0
    finally:
        sample.media.update(before)


def test_the_hub_has_the_decoder_s_keys_at_the_top() -> None:
    nested = tiny_config().to_dict()
    flat = {key: value for key, value in nested.items() if key != "text_config"}
    flat |= {key: value for key, value in nested["text_config"].items() if key not in ("model_type", "dtype")}
    flat["vision_config"] = {**flat["vision_config"], "in_chans": 3, "spatial_patch_size": 16}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 4]}
    flat["rope_theta"] = flat.pop("rope_parameters")["rope_theta"]
    found, wanted = (Qwen25VLConfig.from_arch(arch) for arch in (flat, nested))
    assert found.rotary == wanted.rotary and found.tower_costs() == wanted.tower_costs()
    keys = ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size", "rms_norm_eps")
    assert [getattr(found.text, key) for key in keys] == [getattr(wanted.text, key) for key in keys]
