"""The training step that all families share."""

from zoo.steps.packed_step import PackedStep, Parts

__all__ = ["PackedStep", "Parts"]
