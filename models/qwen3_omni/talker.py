"""Qwen3-Omni's talker: a decoder with experts that predicts a frame's first code, and a code predictor for its residual ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerResizeMLP

from zoo.nn.backend import decoder_layer, get_backend
from zoo.nn.decoder.attention.cache import DecodeCache
from zoo.nn.decoder.attention.rotary import Rotary
from zoo.nn.decoder.block import Decoder
from zoo.nn.decoder.config import transformer_config
from zoo.nn.inputs import Speech
from zoo.nn.vision_language import Talker, groups_of_one_stage

if TYPE_CHECKING:
    from zoo.config.schema import Recipe
    from zoo.models.qwen3_omni.config import PredictorConfig, Qwen3TalkerConfig

SUPPRESSED = 1024  # last codes of the first codebook, which transformers suppresses but for the end


class CodeHead(torch.nn.Module):
    """The weight (codes, hidden) that says one residual code; no linear, so that adapters leave it alone, as they do every head."""

    def __init__(self, codes: int, hidden: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(codes, hidden))


class CodePredictor(MegatronModule):
    """A dense decoder over the codebooks of each frame by itself: a frame is a row of a batch, a codebook a token."""

    def __init__(self, config: PredictorConfig, recipe: Recipe) -> None:
        # A sequence is a frame's few codes, which a rank has by itself but for heads and widths.
        alone = recipe.replace(
            {f"parallel.{key}": size for key, size in (("cp", 1), ("ep", 1), ("etp", 1), ("sp", False))}
        )
        text, decoder_config = config.text, transformer_config(config.text, alone, qk_norm=True)
        super().__init__(config=decoder_config)
        groups = groups_of_one_stage()
        self.tp_group, groups.cp = groups.tp, groups.pp
        provider, residual = get_backend(recipe.engine.backend, decoder_config), text.num_code_groups - 1
        layers = [decoder_layer(decoder_config, provider, experts=False) for _ in range(text.num_hidden_layers)]
        self.decoder = Decoder(
            decoder_config,
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=provider.layer_norm(rms_norm=True)),
            pg_collection=groups,
        )
        self.rotary = Rotary(config.rotary)
        shape, std = (text.vocab_size, text.hidden_size), text.initializer_range
        tables = [torch.nn.Embedding(*shape) for _ in range(residual)]
        heads = [CodeHead(*shape) for _ in range(residual)]
        for module in (*tables, *heads):
            torch.nn.init.normal_(module.get_parameter("weight"), std=std)
        self.embeddings, self.heads = torch.nn.ModuleList(tables), torch.nn.ModuleList(heads)

    def forward(self, states: Tensor, frames: Tensor, embedded: Tensor) -> Tensor:
        """Logits (codebooks - 1, F, vocabulary/tp) of the residual codes, each given those before it.

        Every tensor-parallel rank has the heads whole, and works out its share of the logits.

        Args:
            states: (F, hidden) the talker's, which predicted the frames' first codes.
            frames: (F, codebooks) int64.
            embedded: (codebooks, F, hidden) of these codes, the last of which nobody reads.
        """
        positions = torch.arange(len(embedded), device=states.device).expand(1, len(frames), -1)
        hidden = self.decoder(torch.cat((states[None], embedded[:-1])), self.rotary(positions), None, None, None)
        group, weights = self.tp_group, torch.stack([head.get_parameter("weight") for head in self.heads])
        hidden, weights = (copy_to_tensor_model_parallel_region(x, group=group) for x in (hidden[1:], weights))
        weights = weights.chunk(group.size(), dim=1)[group.rank()]
        return torch.bmm(hidden, weights.transpose(1, 2).to(hidden.dtype))

    def say(self, states: Tensor, first: Tensor, pick: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Residual codes (F, codebooks - 1) int64 of frames, one after the other, and the sum (F, hidden) of their embeddings.

        Args:
            states: (F, hidden) as for `forward`.
            first: (F, hidden) embeddings of the frames' first codes.
            pick: chooses codes (F,) by logits (F, vocabulary).
        """
        # A frame has few codes: its sequence is read anew for each, without a cache.
        read, codes = torch.stack((states, first)), list[Tensor]()
        for table, head in zip(self.embeddings, self.heads, strict=True):
            positions = torch.arange(len(read), device=read.device).expand(1, read.shape[1], -1)
            hidden = self.decoder(read, self.rotary(positions), None, None, None)
            codes.append(pick(torch.nn.functional.linear(hidden[-1], head.get_parameter("weight"))))
            read = torch.cat((read, table(codes[-1])[None]))
        return torch.stack(codes, dim=1), read[2:].sum(0)

    def embed(self, frames: Tensor) -> Tensor:
        """(codebooks - 1, F, hidden) of the residual codes of frames (F, codebooks)."""
        return torch.stack([table(codes) for table, codes in zip(self.embeddings, frames.T[1:], strict=True)])


class Qwen3Talker(Talker):
    """A decoder with experts, and the code predictor."""

    def __init__(self, config: Qwen3TalkerConfig, recipe: Recipe) -> None:
        super().__init__(config, recipe)
        self.codebooks, end, codes = config.codebooks, int(config.hf.codec_eos_token_id), config.text.vocab_size
        self.ends, self.suppressed = (
            (end,),
            tuple(code for code in range(max(0, codes - SUPPRESSED), codes) if code != end),
        )
        self.text_projection = Qwen3OmniMoeTalkerResizeMLP(config.hf)
        self.hidden_projection = Qwen3OmniMoeTalkerResizeMLP(config.hf)
        self.code_predictor = CodePredictor(config.predictor, recipe)

    def logits(
        self, embedded: Tensor, states: Tensor, speech: Speech, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As every talker's, whose rows of text are projected before codes are added."""
        hidden = self.last_states(embedded, states, speech)
        residual = self.code_predictor.embed(speech.frames)
        firsts = self._embedded(speech.frames[None, :, 0])[:, 0]
        frame_states = hidden.index_select(0, speech.frame_rows)
        predicted = self.code_predictor(frame_states, speech.frames, torch.cat((firsts[None], residual)))
        hidden = hidden if rows is None else hidden.index_select(0, rows)
        return self._logits(hidden, None), predicted

    def last_states(self, embedded: Tensor, states: Tensor, speech: Speech, cache: DecodeCache | None = None) -> Tensor:
        """As every talker's."""
        hidden = self.text_projection(embedded)
        hidden = hidden.index_copy(0, speech.state_rows, self.hidden_projection(states))
        hidden = hidden.index_add(0, speech.code_rows, self._embedded(speech.codes[None])[:, 0].to(hidden.dtype))
        residual = self.code_predictor.embed(speech.input_frames).sum(0)
        return self.decoded(hidden.index_add(0, speech.input_rows, residual.to(hidden.dtype)), speech, cache)

    def next_input(
        self, states: Tensor, firsts: Tensor, text: Tensor, pick: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """As every talker's, residual codes by the code predictor."""
        first = self._embedded(firsts[None])[:, 0]
        residual, embedded = self.code_predictor.say(states, first.to(states.dtype), pick)
        return residual, first + embedded + self.text_projection(text)
