"""The training step that all families share."""

from zoo.steps.media import MediaStream, frames
from zoo.steps.packed_step import PackedStep
from zoo.steps.shard import Parts

__all__ = ["MediaStream", "PackedStep", "Parts", "frames"]
