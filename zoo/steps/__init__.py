"""The training step that all families share."""

from zoo.steps.media import MediaStream, frames
from zoo.steps.objectives.objective import Objective, StepRank
from zoo.steps.packed_step import PackedStep
from zoo.steps.shard import Parts

__all__ = ["MediaStream", "Objective", "PackedStep", "Parts", "StepRank", "frames"]
