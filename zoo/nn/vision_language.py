"""What families share of their models: a decoder alone, one with a vision tower of transformers, one with an audio tower too, and a talker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from zoo.config.derived import trains_thinker
from zoo.config.schema import Recipe
from zoo.nn.decoder.attention.cache import DecodeCache
from zoo.nn.decoder.attention.self_attention import SeqParams
from zoo.nn.decoder.block import NotedStates
from zoo.nn.decoder.config import transformer_config
from zoo.nn.decoder.experts.router import track_layers
from zoo.nn.family import FamilyConfig, SpeakingConfig, TalkerConfig
from zoo.nn.head import cross_entropy, most_likely
from zoo.nn.inputs import Encoded, Media, ModelInputs, Speech, Stage, Vocabulary, on_device_of
from zoo.nn.multimodal import MultimodalModel, Rows, joined
from zoo.nn.towers.attention import use_varlen_attention
from zoo.nn.towers.recompute import recompute_layers
from zoo.packing import PackedLayout

ONE_STAGE = {"parallel.pp": 1, "parallel.vpp": 1, "parallel.stage_layers": []}
"""Keys of a recipe for a decoder that stands whole on a stage of the pipeline."""


class LanguageModel(MultimodalModel):
    """Decoder of a family's config, with its traits; no towers unless `build_towers` and `encode` give some."""

    def __init__(self, config: FamilyConfig, recipe: Recipe, stage: Stage, *, varlen: bool = True) -> None:
        """`varlen`: towers take all media as one row, with bounds."""
        towers = self.build_towers(config) if stage.first else {}
        for tower in towers.values():
            if varlen:
                use_varlen_attention(tower)
            if recipe.engine.recompute == "full":
                recompute_layers(tower, offload=recipe.engine.offload_activations)
        traits = dict.fromkeys(config.traits, True)
        super().__init__(
            transformer_config(config.text, recipe, mtp_layers=config.mtp_layers(recipe), **traits),
            vocabulary=Vocabulary(
                config.text.vocab_size,
                config.tied,
                config.embedding_scale,
                config.logit_softcap,
                scores=recipe.train.scores,
                embeds=recipe.train.embeds,
            ),
            rotary=config.rotary,
            local_rotary=config.local_rotary,
            backend=recipe.engine.backend,
            stage=stage,
            towers=towers,
            deepstack_layers={"vision": config.deepstack_layers},
        )

    def build_towers(self, config: FamilyConfig) -> dict[str, torch.nn.Module]:
        """Towers by their names, with weights as transformers initialises them."""
        return {}


class VisionLanguageModel(LanguageModel):
    """Decoder with a `vision` tower."""

    def build_towers(self, config: FamilyConfig) -> dict[str, torch.nn.Module]:
        """Towers by their names, with weights as transformers initialises them."""
        from transformers import AutoModel

        return {"vision": AutoModel.from_config(config.vision)}

    def tower_names(self) -> tuple[str, ...]:
        """The name of the one tower."""
        return ("vision",)

    def encode(self, media: Media) -> dict[str, Encoded]:
        """Images, then videos, through the vision tower in one call, with the step's `tower_inputs`."""
        pixels = [media[k] for k in ("pixel_values", "pixel_values_videos") if k in media]
        if not pixels:
            return {}
        grids = torch.cat([media[k] for k in ("image_grid_thw", "video_grid_thw") if k in media])
        worked_out = {name.removeprefix("vision."): x for name, x in media.items() if name.startswith("vision.")}
        seen = self.vision(
            torch.cat(pixels).to(self.vision.dtype), grid_thw=on_device_of(grids, pixels[0]), **worked_out
        )
        deepstack = tuple(seen.deepstack_features) if self.deepstack_layers else ()
        return {"vision": Encoded(seen.pooler_output, deepstack)}


class OmniModel(VisionLanguageModel):
    """Decoder with a `vision` and an `audio` tower, which takes (frames, mel) of all clips and the frames of each."""

    def tower_names(self) -> tuple[str, ...]:
        """The names of both towers."""
        return ("vision", "audio")

    def encode(self, media: Media) -> dict[str, Encoded]:
        """Images, then videos, through the vision tower in one call; audio clips through the audio tower."""
        encoded = super().encode(media)
        if "input_features" in media:
            features = media["input_features"].to(self.config.params_dtype)  # (frames, mel)
            encoded["audio"] = Encoded(self.audio(features, media["feature_lens"].tolist()))
        return encoded


class TileModel(VisionLanguageModel):
    """Decoder with a `vision` tower, which takes pictures of one size as a batch, and its `projector`.

    A family gives both in `build_towers`, and `encode`.
    """

    def __init__(self, config: FamilyConfig, recipe: Recipe, stage: Stage) -> None:
        super().__init__(config, recipe, stage, varlen=False)

    def zero_of(self, name: str) -> Tensor | float:
        """The projector is idle when its tower is."""
        return super().zero_of(name) + super().zero_of("projector")


class Talker(MultimodalModel, ABC):
    """The decoder over a row's text and codes; `embedding` and `output_layer` are of the first codebook.

    Attributes:
        codebooks: codes of a frame.
        ends: first codes that end a speech, in transformers' `generate`.
        suppressed: first codes that it never says.
        opening: first codes that its repetition penalty counts before any is said.
    """

    codebooks: int = 1
    ends: tuple[int, ...]
    suppressed: tuple[int, ...]
    opening: tuple[int, ...] = ()

    def __init__(self, config: TalkerConfig, recipe: Recipe, *, width: int | None = None) -> None:
        """`recipe`: of one pipeline stage; `width`: of the codes' embeddings, if not the decoder's."""
        super().__init__(
            transformer_config(config.text, recipe, **dict.fromkeys(config.traits, True)),
            vocabulary=Vocabulary(config.text.vocab_size, width=width),
            rotary=config.rotary,
            backend=recipe.engine.backend,
            stage=Stage(),
            towers={},
            groups=groups_of_one_stage(),
        )

    def losses(self, embedded: Tensor, states: Tensor, speech: Speech, *, count_correct: bool = False) -> Tensor:
        """Negative log likelihoods (F + S + F (codebooks - 1),) fp32: of first codes and ends, then of each frame's residual codes.

        Args:
            embedded: (T, hidden of the thinker) its embeddings of `speech.text`.
            states: (N, hidden of the thinker) its states that `speech.state_rows` read.
            count_correct: (2, ...), the second row 1.0 where the code was the most likely one.
        """
        first, residual = self.logits(embedded, states, speech, speech.label_rows)
        every = [(first, speech.targets, len(speech.segments) > 0)]
        if residual is not None:
            codes = speech.frames[:, 1:].flatten()
            every.append((residual.transpose(0, 1).flatten(0, 1), codes, not bool(speech.ends.all())))
        losses = []
        for logits, targets, counts in every:
            correct = [most_likely(logits, self.tp_group) == targets] if count_correct else []
            loss = cross_entropy(logits, targets, self.tp_group)
            loss = torch.stack((loss, *(hits.to(loss.dtype) for hits in correct))) if correct else loss
            losses.append(loss if counts else loss[..., :0] + loss.sum() * 0.0)
        return torch.cat(losses, dim=-1)

    def decoded(self, hidden: Tensor, speech: Speech, cache: DecodeCache | None = None) -> Tensor:
        """States (T, C) behind the layers of what goes into them (T, C), whole on every tensor-parallel rank."""
        cp, hidden = self.groups.cp, hidden[:, None]
        params = SeqParams.from_layout(speech.layout, cp if cp.size() > 1 else None)
        params.cache = cache
        if self.config.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden, group=self.tp_group)
        mask = self._local_mask(speech.padding_mask)
        hidden = self.decoder(hidden, self.rotary(speech.positions), params, mask, None)
        if self.config.sequence_parallel:  # what reads it computes the same on all ranks
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return hidden[:, 0]

    @abstractmethod
    def logits(
        self, embedded: Tensor, states: Tensor, speech: Speech, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the first code behind each of the talker's `rows`, None: behind all (T', vocabulary); and of residual codes
        (codebooks - 1, F, vocabulary), None where there is one codebook."""

    @abstractmethod
    def last_states(self, embedded: Tensor, states: Tensor, speech: Speech, cache: DecodeCache | None = None) -> Tensor:
        """States (T', hidden) behind the last layer, of arguments as `losses` has them."""

    @abstractmethod
    def next_input(
        self, states: Tensor, firsts: Tensor, text: Tensor, pick: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Residual codes (S, codebooks - 1) of frames, and what is read with them (S, hidden); arguments as `go_on` has them."""

    def begin(self, embedded: Tensor, states: Tensor, speech: Speech, cache: DecodeCache) -> Tensor:
        """Read S sequences of no frames yet: states (S, hidden) that predict their first ones."""
        return self.last_states(embedded, states, speech, cache).index_select(0, speech.label_rows)

    def first_logits(self, states: Tensor) -> Tensor:
        """Logits (S, vocabulary) of the first codes that states (S, hidden) predict."""
        return self._logits(states, None)

    def go_on(
        self, states: Tensor, firsts: Tensor, text: Tensor, position: Tensor, cache: DecodeCache, pick: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Complete a frame of each sequence and read it: residual codes (S, codebooks - 1), and states (S, hidden) that predict the next one.

        Args:
            states: (S, hidden) that predicted these frames.
            firsts: (S,) int64 first codes.
            text: (S, hidden of the thinker) what is read with the frames.
            position: (3, S).
            pick: chooses codes (S,) by logits (S, vocabulary).
        """
        residual, hidden = self.next_input(states, firsts, text, pick)
        params = SeqParams.from_layout(PackedLayout.from_lengths([1] * len(states)).to(states.device))
        params.cache = cache
        out: Tensor = self.decoder(hidden.to(states.dtype)[:, None], self.rotary(position[:, None]), params, None, None)
        return residual, out[:, 0]


def groups_of_one_stage() -> ProcessGroupCollection:
    """This rank's groups for a decoder that stands whole on a stage of the pipeline."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.pp = groups.gtp_remat  # megatron-core's ranks that share a weight out to gather it: here each by itself
    return groups


class SpeakingModel(OmniModel):
    """A thinker, with a `talker` where a recipe trains it, whole on the last stage of the pipeline.

    What the talker reads, text embeddings and states of the thinker, goes there with the hidden states.

    Attributes:
        talks: the family's talker.
        accepted: the thinker's layer whose states the talker reads, as `NotedStates` counts.
        joint: whether the thinker is trained, too.
    """

    talks: ClassVar[type[Any]]  # `Talker` of its family, built of (TalkerConfig, Recipe)
    talker: Talker

    def __init__(self, config: SpeakingConfig, recipe: Recipe, stage: Stage) -> None:
        """The talker is built where the model has one, which `Processor.train_speech` sees to in a run."""
        super().__init__(config, recipe, stage)
        self.accepted, self.joint = config.accepted, trains_thinker(recipe)
        self._routed: tuple[TransformerConfig, ...] = (self.config,)
        if recipe.train.speech_loss and config.talker is not None:
            talker, whole = config.checked_talker(), recipe.replace(ONE_STAGE)
            routed = transformer_config(talker.text, whole, **dict.fromkeys(talker.traits, True))
            track_layers(routed)
            self._routed = (self.config, routed) if self.joint else (routed,)
            if stage.last:
                self.talker = type(self).talks(talker, whole)

    @property
    def routed_configs(self) -> tuple[TransformerConfig, ...]:
        """That of the talker where it is trained, and that of a thinker that is: the same ones on every stage."""
        return self._routed

    def forward(self, inputs: ModelInputs, noted: NotedStates | None = None) -> Tensor:
        """With `speech` in the inputs the losses of the text, if the thinker is trained, and what `Talker.losses` gives; else the thinker's.

        Gradients go through what the talker reads, so that a thinker that is trained learns to be spoken, too: `generate` of
        transformers hands the thinker's embeddings and states over as they are, and the report of the models (arXiv 2503.20215) has both
        trained end to end as one. A thinker that is frozen has no backward pass.
        """
        speech: Speech | None = getattr(inputs, "speech", None)
        if speech is None:
            return super().forward(inputs, noted)
        noted, rows = self.noted_states(), self._received_rows(speech)
        thinker: Rows = ()
        if self.joint:
            thinker = (super().forward(inputs, noted),)
        elif len(rows) < 2:  # the layer that is read is yet to come
            with torch.no_grad():
                hidden, features, _ = self.decode(inputs, noted)
            thinker = () if noted.states is not None else (joined(hidden, features),)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.joint):
            rows += (self._embedded(speech.text[None])[:, 0],) if self.pre_process else ()
            rows += (self._states(speech, noted),) if noted.states is not None else ()
        if not self.post_process:
            return joined(thinker[0], rows) if thinker else joined(rows[0][:, None], rows[1:])
        embedded, states = rows
        codes = self.talker.losses(embedded, states, speech, count_correct=inputs.count_correct)
        return torch.cat((*thinker, codes), dim=-1)

    def _received_rows(self, speech: Speech) -> Rows:
        """What of `read` the stages before have sent, which is taken off what the decoder gets: nothing, embeddings, or states as well."""
        if self.pre_process:
            return ()
        sizes = [len(speech.text)]
        if get_transformer_layer_offset(self.config, self.vp_stage) >= self.accepted:
            sizes.append(len(speech.state_rows))
        assert self.input_tensor is not None
        self.input_tensor, rows = self.input_tensor.tensor_split([len(self.input_tensor) - sum(sizes)])
        return tuple(rows[:, 0].split(sizes))

    def noted_states(self) -> NotedStates:
        """A place for the states that the talker reads, at which a thinker that is not trained ends."""
        return NotedStates(self.accepted, alone=not self.joint)

    def read(self, inputs: ModelInputs, speech: Speech, noted: NotedStates) -> tuple[Tensor, Tensor]:
        """What the talker reads: embeddings (T, hidden) of its text, and states (N, hidden).

        `noted`: the states of a thinker that has run; of one that has not, which is not trained, they are worked out here.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.joint):
            if noted.states is None:
                self.decode(inputs, noted)
            return self._embedded(speech.text[None])[:, 0], self._states(speech, noted)

    def _states(self, speech: Speech, noted: NotedStates) -> Tensor:
        """(N, hidden) of those that a thinker has noted."""
        states, cp = noted.states, self.groups.cp
        assert states is not None
        if self.config.sequence_parallel:  # the talker's inputs are the same on all ranks
            states = gather_from_sequence_parallel_region(
                states, tensor_parallel_output_grad=False, group=self.tp_group
            )
        states = states[:, 0].index_select(0, speech.thinker_rows)
        if cp.size() > 1:  # each rank brings those that it holds, and reads any
            every = states.new_zeros(speech.states, states.shape[1]).index_copy(0, speech.held_ids, states)
            every = reduce_from_tensor_model_parallel_region(every, group=cp)
            states = copy_to_tensor_model_parallel_region(every, group=cp).index_select(0, speech.state_ids)
        return states

    def to_say(self, speech: Speech, noted: NotedStates) -> Tensor:
        """(S, R, hidden) what frames are read with that are still to be said: embeddings, and where `trailing_rows` asks for them states."""
        assert speech.trailing is not None
        texts = self._embedded(speech.trailing.T)
        if speech.trailing_rows is None:
            return texts
        assert noted.states is not None
        states = noted.states[:, 0][speech.trailing_rows.clamp(min=0)].to(texts.dtype)
        return texts + states.masked_fill((speech.trailing_rows < 0)[..., None], 0.0)
