"""The training step that all families share."""

from zoo.steps.media import MediaStream, frames
from zoo.steps.packed_step import Objective, PackedStep, StepRank
from zoo.steps.shard import Parts

__all__ = ["MediaStream", "Objective", "PackedStep", "Parts", "StepRank", "frames"]
