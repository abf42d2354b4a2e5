"""Qwen3-VL's step."""

from __future__ import annotations

from zoo.steps.vision import VisionStep


class Qwen3VLStep(VisionStep):
    """Positions, placeholders and media as `VisionStep` has them; deepstack features follow the embeddings."""
