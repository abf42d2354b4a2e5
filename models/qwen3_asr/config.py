"""Qwen3-ASR's architecture, as transformers describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zoo.errors import UserError
from zoo.nn.family import FamilyConfig
from zoo.nn.towers.audio import audio_cost, check_audio
from zoo.packing.cost import TowerCost

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ALIGNER = "Qwen3ASRForTokenClassification"


class Qwen3ASRConfig(FamilyConfig):
    """A `transformers.Qwen3ASRConfig` of a model that transcribes."""

    title = "Qwen3-ASR"
    kinds = ("qwen3_asr",)
    traits = ("qk_norm",)

    def check(self) -> None:
        """UserError for the forced aligner, the release's first layout, and parts that are not built."""
        if ALIGNER in (self.hf.architectures or ()):
            raise UserError(
                "config.json is that of Qwen3-ForcedAligner, which has a head of time classes in the place of the "
                "vocabulary's; only the models that transcribe are trained: Qwen3-ASR-0.6B-hf, Qwen3-ASR-1.7B-hf"
            )
        if hasattr(self.hf, "thinker_config"):
            raise UserError(
                "config.json has a thinker_config: these are the weights for the qwen-asr package, which transformers "
                "can't read; give those for transformers: Qwen/Qwen3-ASR-0.6B-hf or Qwen/Qwen3-ASR-1.7B-hf"
            )
        for key, part, built in (
            ("text_config", self.text, "qwen3"),
            ("audio_config", self.audio, "qwen3_asr_encoder"),
        ):
            if part.model_type != built:
                raise UserError(f"{key}.model_type is {part.model_type!r}; {self.title} here has {built!r} only")
        check_audio(self.audio, "max_position_embeddings")

    @property
    def audio(self) -> PretrainedConfig:
        """The audio tower's config."""
        return self.hf.audio_config

    def tower_costs(self) -> dict[str, TowerCost]:
        """The audio tower with its projector; a row is a mel frame."""
        return {"audio": audio_cost(self.audio)}
