"""What configs share whose decoder has layers that see a window of tokens, and others that see all (Gemma 3 and later)."""

from __future__ import annotations

from typing import Any, ClassVar

from zoo.nn.family import FamilyConfig
from zoo.nn.inputs import RotaryShape


class WindowedConfig(FamilyConfig):
    """Sliding and full layers, each kind with its rotary embedding; norms, embeddings and queries as Gemma has them."""

    sliding: ClassVar[bool] = True
    traits: ClassVar[tuple[str, ...]] = ("qk_norm", "zero_centered", "sandwich_norms")

    @property
    def rotary(self) -> RotaryShape:
        """The angles of layers that see all earlier tokens."""
        return _shape(self.text.rope_parameters["full_attention"])

    @property
    def local_rotary(self) -> RotaryShape:
        """The angles of layers that see a window."""
        return _shape(self.text.rope_parameters["sliding_attention"])

    @property
    def embedding_scale(self) -> float:
        """Factor of tokens' embeddings."""
        return float(self.text.hidden_size) ** 0.5


def _shape(rope: Any) -> RotaryShape:
    if rope.get("rope_type") == "proportional":
        fraction = float(rope.get("partial_rotary_factor", 1.0))
        return RotaryShape(
            float(rope["rope_theta"]), fraction=fraction, factor=float(rope.get("factor", 1.0)), whole=True
        )
    linear = rope.get("rope_type") == "linear"
    return RotaryShape(float(rope["rope_theta"]), factor=float(rope["factor"]) if linear else 1.0)
