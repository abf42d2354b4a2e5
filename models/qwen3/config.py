"""Qwen3's architecture, as transformers describes it."""

from __future__ import annotations

from zoo.nn.family import FamilyConfig


class Qwen3Config(FamilyConfig):
    """A `transformers.Qwen3Config`, or a `Qwen3MoeConfig`."""

    title = "Qwen3"
    kinds = ("qwen3", "qwen3_moe")
    traits = ("qk_norm",)
