"""The architecture of Gemma 3's language models, as transformers describes it."""

from __future__ import annotations

from zoo.nn.family import WindowedConfig


class Gemma3TextConfig(WindowedConfig):
    """A `transformers.Gemma3TextConfig`."""

    title = "Gemma 3, text"
    kinds = ("gemma3_text",)

    @property
    def logit_softcap(self) -> float | None:
        """Cap of the logits, which transformers' class with images does not read."""
        cap: float | None = self.text.final_logit_softcapping
        return cap
