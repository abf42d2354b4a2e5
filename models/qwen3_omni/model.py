"""Qwen3-Omni: towers from transformers on zoo's multimodal decoder, and the talker."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as hf

from zoo.config.schema import Recipe
from zoo.models.qwen3_omni.config import Qwen3OmniConfig
from zoo.models.qwen3_omni.speech import Speech
from zoo.models.qwen3_omni.talker import Talker
from zoo.nn.family import FamilyConfig, tower_config
from zoo.nn.inputs import ModelInputs, Stage
from zoo.nn.towers.audio import encode_clips
from zoo.nn.vision_language import OmniModel


class AudioTower(hf.Qwen3OmniMoeAudioEncoder):
    """transformers' encoder, with parameters under the same names, run on a flat batch of clips and independent of it."""

    def forward(self, features: Tensor, frames: list[int]) -> Tensor:
        """features (F, mel) of all clips end to end, `frames` of each clip -> (tokens, output_dim)."""
        out: Tensor = self.proj2(self.act(self.proj1(encode_clips(self, features, frames))))
        return out


class Qwen3OmniModel(OmniModel):
    """Queries and keys are normed in each head; features from within the vision tower are added to the decoder's layers."""

    def __init__(self, config: Qwen3OmniConfig, recipe: Recipe, stage: Stage) -> None:
        """With a `talker` where the recipe trains it and the model has one, which `Processor.train_speech` sees to in a run."""
        super().__init__(config, recipe, stage)
        if recipe.train.speech_loss and config.talker is not None:
            talker = config.checked_talker()
            self.accepted, self.talker = int(talker.hf.accept_hidden_layer), Talker(talker, recipe)

    @property
    def routed_config(self) -> TransformerConfig:
        """The talker's, where it is trained."""
        return self.talker.config if hasattr(self, "talker") else self.config

    def build_towers(self, config: FamilyConfig) -> dict[str, torch.nn.Module]:
        """The vision and the audio tower with weights as transformers initialises them."""
        vision = hf.Qwen3OmniMoeVisionEncoder._from_config(
            config.vision
        )  # first: random weights are drawn in this order
        return {"vision": vision, "audio": AudioTower._from_config(tower_config(config.root.audio_config))}

    def forward(self, inputs: ModelInputs) -> Tensor:
        """With `speech` in the inputs what `Talker.losses` gives; else as the thinker's."""
        speech: Speech | None = getattr(inputs, "speech", None)
        if speech is None:
            return super().forward(inputs)
        out: Tensor = self.talker.losses(*self.thoughts(inputs, speech), speech, count_correct=inputs.count_correct)
        return out

    @torch.no_grad()
    def thoughts(self, inputs: ModelInputs, speech: Speech) -> tuple[Tensor, Tensor]:
        """What the talker reads of a thinker that is not trained: embeddings (T + 3, hidden) and states (T, hidden)."""
        embedded, deepstack, _ = self._embed(inputs)
        states = self.decoder(
            embedded, self.rotary(inputs.positions), inputs.seq_params, inputs.padding_mask, deepstack,
            most_tokens=inputs.most_tokens, until=self.accepted,
        )  # fmt: skip
        specials = self._embedded(speech.specials[None])
        return torch.cat((embedded, specials))[:, 0], states[:, 0]
