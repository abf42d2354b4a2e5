"""Qwen3-Omni's talker: a decoder with experts that predicts a frame's first code, and a code predictor for its residual ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerResizeMLP

from zoo.nn.backend import decoder_layer, get_backend
from zoo.nn.decoder.attention.rotary import Rotary
from zoo.nn.decoder.attention.self_attention import SeqParams
from zoo.nn.decoder.block import Decoder
from zoo.nn.decoder.config import transformer_config
from zoo.nn.head import cross_entropy, most_likely
from zoo.nn.inputs import Stage, Vocabulary
from zoo.nn.multimodal import MultimodalModel

if TYPE_CHECKING:
    from zoo.config.schema import Recipe
    from zoo.models.qwen3_omni.config import PredictorConfig, TalkerConfig
    from zoo.models.qwen3_omni.speech import Speech


class CodePredictor(MegatronModule):
    """A dense decoder over the codebooks of each frame by itself: a frame is a row of a batch, a codebook a token."""

    def __init__(self, config: PredictorConfig, recipe: Recipe) -> None:
        text, decoder_config = config.text, transformer_config(config.text, recipe, qk_norm=True)
        super().__init__(config=decoder_config)
        provider, residual = get_backend(recipe.engine.backend, decoder_config), text.num_code_groups - 1
        layers = [decoder_layer(decoder_config, provider, experts=False) for _ in range(text.num_hidden_layers)]
        self.decoder = Decoder(
            decoder_config,
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=provider.layer_norm(rms_norm=True)),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        self.rotary = Rotary.from_shape(decoder_config.kv_channels, config.rotary)
        shape, std = (text.vocab_size, text.hidden_size), text.initializer_range
        tables = [torch.nn.Embedding(*shape) for _ in range(residual)]
        heads = [torch.nn.Linear(*shape[::-1], bias=False) for _ in range(residual)]
        for module in (*tables, *heads):
            torch.nn.init.normal_(module.get_parameter("weight"), std=std)
        self.embeddings, self.heads = torch.nn.ModuleList(tables), torch.nn.ModuleList(heads)

    def forward(self, states: Tensor, frames: Tensor, embedded: Tensor) -> Tensor:
        """Logits (codebooks - 1, F, vocabulary) of the residual codes, each given those before it.

        Args:
            states: (F, hidden) the talker's, which predicted the frames' first codes.
            frames: (F, codebooks) int64.
            embedded: (codebooks, F, hidden) of these codes, the last of which nobody reads.
        """
        positions = torch.arange(len(embedded), device=states.device).expand(1, len(frames), -1)
        hidden = self.decoder(torch.cat((states[None], embedded[:-1])), self.rotary(positions), None, None, None)
        return torch.bmm(
            hidden[1:],
            torch.stack([head.get_parameter("weight") for head in self.heads]).transpose(1, 2).to(hidden.dtype),
        )

    def embed(self, frames: Tensor) -> Tensor:
        """(codebooks - 1, F, hidden) of the residual codes of frames (F, codebooks)."""
        return torch.stack([table(codes) for table, codes in zip(self.embeddings, frames.T[1:], strict=True)])


class Talker(MultimodalModel):
    """The decoder over a row's text and codes; `embedding` and `output_layer` are of the first codebook."""

    def __init__(self, config: TalkerConfig, recipe: Recipe) -> None:
        super().__init__(
            transformer_config(config.text, recipe, qk_norm=True),
            vocabulary=Vocabulary(config.text.vocab_size),
            rotary=config.rotary,
            backend=recipe.engine.backend,
            stage=Stage(),
            towers={},
        )
        self.text_projection = Qwen3OmniMoeTalkerResizeMLP(config.hf)
        self.hidden_projection = Qwen3OmniMoeTalkerResizeMLP(config.hf)
        self.code_predictor = CodePredictor(config.predictor, recipe)

    def losses(self, embedded: Tensor, states: Tensor, speech: Speech, *, count_correct: bool = False) -> Tensor:
        """Negative log likelihoods (F + S + F (codebooks - 1),) fp32: of first codes and ends, then of each frame's residual codes.

        Args:
            embedded: (T + 3, hidden of the thinker) what its first layer reads, and the embeddings of `speech.specials`.
            states: (T, hidden of the thinker) what its layer `accept_hidden_layer` gives.
            count_correct: (2, ...), the second row 1.0 where the code was the most likely one.
        """
        first, residual = self.logits(embedded, states, speech, speech.label_rows)
        every = [(first, speech.targets), (residual.transpose(0, 1).flatten(0, 1), speech.frames[:, 1:].flatten())]
        correct = [most_likely(logits, self.tp_group) == wanted for logits, wanted in every] if count_correct else []
        losses = torch.cat([cross_entropy(logits, wanted, self.tp_group) for logits, wanted in every])
        return torch.stack((losses, torch.cat(correct).to(losses.dtype))) if correct else losses

    def logits(
        self, embedded: Tensor, states: Tensor, speech: Speech, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits of the first code behind each of the talker's `rows`, None: behind all (T', vocabulary); and of residual codes (codebooks - 1, F, vocabulary)."""
        hidden = self.text_projection(embedded.index_select(0, speech.text))
        hidden = hidden.index_copy(0, speech.media, self.hidden_projection(states.index_select(0, speech.seen)))
        hidden = hidden.index_add(0, speech.coded, self._embedded(speech.codes[None])[:, 0].to(hidden.dtype))
        residual = self.code_predictor.embed(speech.frames)
        hidden = hidden.index_add(0, speech.heard, residual.sum(0).to(hidden.dtype))
        rotary, mask = self.rotary(speech.positions), speech.padding_mask
        hidden = self.decoder(hidden[:, None], rotary, SeqParams.from_layout(speech.layout), mask, None)[:, 0]
        firsts = self._embedded(speech.frames[None, :, 0])[:, 0]
        asked = hidden.index_select(0, speech.asked)
        predicted = self.code_predictor(asked, speech.frames, torch.cat((firsts[None], residual)))
        hidden = hidden if rows is None else hidden.index_select(0, rows)
        return self._logits(hidden, None), predicted
