"""What the configs of all families share: an architecture as transformers describes it, read for training."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from zoo.config.architecture import check_arch, refuse_unbuilt
from zoo.config.locate import read_arch, unquantised
from zoo.config.schema import Recipe
from zoo.errors import UserError, printable
from zoo.nn.config_checks import check_decoder, check_sides, check_towers
from zoo.nn.decoder.attention.rotary import RotaryShape, rotary_shape
from zoo.nn.decoder.config import full_heads, head_width
from zoo.packing.cost import Projection, TowerCost
from zoo.packing.spoken import SpeechTokens
from zoo.types import JsonObject

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# Keys that say how transformers is to compute and in what to hand it back, not what: zoo computes in its own ways.
EXECUTION = (
    "return_dict", "output_hidden_states", "output_attentions",
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
)  # fmt: skip


class Tokenized(Protocol):
    """The part of a processor that a config reads."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def token_ids(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class FamilyConfig:
    """A transformers config with a decoder and a vision tower. A family subclasses it and sets the class variables.

    Keys are read as transformers reads them. It keeps keys that a config class doesn't have, and its models never look at
    them: such a key (`num_experts` of a dense model) is not seen here either, but for those in `further`.
    """

    hf: PretrainedConfig

    title: ClassVar[str]  # the family's, for messages
    sliding: ClassVar[bool] = False  # whether layers may see a window, with rotary angles of their own
    kinds: ClassVar[tuple[str, ...]]  # what model_type of a config.json may be
    not_built: ClassVar[Mapping[str, str]] = {}  # a model_type close to these -> why it can't be trained, for messages
    further: ClassVar[tuple[str, ...]] = ("head_dim",)  # keys of a decoder that are read though its class has none
    mrope_section: ClassVar[tuple[int, ...] | None] = None  # where a config has none; None: one position a token
    mrope_interleaved: ClassVar[bool] = True  # or the first frequencies time's, then height's, then width's
    further_angles: ClassVar[tuple[str, ...]] = ()  # rope_type of sliding decoders, beside those of all
    builds: ClassVar[tuple[str, ...]] = ()  # keys of `refuse_unbuilt` that are read here all the same
    partial_rotary: ClassVar[bool] = False  # whether transformers rotates a part of each head where a config says so
    inner: ClassVar[str] = ""  # key of the part with text_config, vision_config and token ids, where one has them

    @classmethod
    def from_arch(cls, arch: JsonObject) -> Self:
        """From the dict of a config.json; UserError for another family's, or for what cannot be trained.

        How its weights are quantised is no part of it: what zoo reads and writes is not.
        """
        from transformers import CONFIG_MAPPING

        check_arch(arch)
        refuse_unbuilt(arch, cls.builds)
        kind = arch.get("model_type")
        if kind in cls.not_built:
            raise UserError(refusal(str(kind), cls.not_built[str(kind)]))
        if kind not in cls.kinds:
            wanted = " or ".join(map(repr, cls.kinds))
            raise UserError(f"model_type {kind!r} is not {cls.title}; wanted {wanted}")
        try:
            hf = CONFIG_MAPPING[kind].from_dict(_computed_here(copy.deepcopy(unquantised(dict(arch)))))
        except Exception as error:  # of many kinds: types, lengths of lists, names that are not known
            message = printable(" ".join(str(error).split()), 300)
            raise UserError(
                f"config.json: transformers can't make {cls.title} of it ({type(error).__name__}: {message}); correct it"
            ) from error
        config = cls(hf)
        for part in ("text_config", "vision_config", "audio_config"):
            if isinstance(getattr(config.root, part, None), dict):  # which transformers makes nothing of
                raise UserError(f"config.json: {cls.title} ({kind}) has no {part}; leave it out")
        check_sides(config)
        config.check()
        check_decoder(config)
        check_towers(config)
        config._check_deepstack()
        return config

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """From a Hugging Face checkpoint folder."""
        return cls.from_arch(read_arch(Path(folder)))

    def for_processor(self, processor: Tokenized) -> Self:
        """The same architecture with the special tokens of the processor's tokenizer.

        Raises UserError where the vocabulary is too small for that tokenizer.
        """
        needed, there = vocabulary_rows(processor.tokenizer), self.text.vocab_size
        if needed > there:
            raise UserError(f"{self.text_prefix}vocab_size is {there}, the tokenizer has {needed} tokens; raise it")
        arch = self.hf.to_dict()
        (arch[self.inner] if self.inner else arch).update(processor.token_ids)
        return self.from_arch(arch)

    def with_vocabulary(self, rows: int) -> Self:
        """The same architecture with so many rows in its embedding and its head."""
        arch = self.hf.to_dict()
        root = arch[self.inner] if self.inner else arch
        for part in (root, root.get("text_config", root)):
            if "vocab_size" in part:
                part["vocab_size"] = rows
        return self.from_arch(arch)

    def check(self) -> None:
        """UserError for settings that transformers takes but training cannot; a family overrides it."""

    def _check_deepstack(self) -> None:
        if not self.deepstack_layers:
            return
        indexes = list(self.vision.deepstack_visual_indexes)
        layers, depth = self.text.num_hidden_layers, self.vision.depth
        if len({i for i in indexes if 0 <= i < depth}) != len(indexes) or len(indexes) > layers:
            raise UserError(
                f"vision_config.deepstack_visual_indexes is {indexes}: a merger of it would never learn; give each "
                f"layer of the tower (0 to {depth - 1}) at most once, and at most {layers}, as the decoder has layers"
            )

    @property
    def traits(self) -> tuple[str, ...]:
        """What the decoder has and its config doesn't say: arguments of `transformer_config`; a family says which."""
        return ()

    @property
    def root(self) -> PretrainedConfig:
        """The config that holds token ids and the parts' configs."""
        return getattr(self.hf, self.inner) if self.inner else self.hf

    @property
    def text_prefix(self) -> str:
        """What stands before the decoder's keys in a message: a language model's stand at the top of config.json."""
        return "text_config." if hasattr(self.root, "text_config") else ""

    @cached_property
    def text(self) -> PretrainedConfig:
        """The decoder's config, with what transformers' decoder reads; a language model's is the whole."""
        return _as_read(self._decoder, self.further)

    @property
    def _decoder(self) -> PretrainedConfig:
        """The decoder's config with all that the file has."""
        return getattr(self.root, "text_config", self.root)

    @cached_property
    def vision(self) -> Any:
        """The vision tower's config, as `tower_config` gives it, or None."""
        return tower_config(getattr(self.root, "vision_config", None))

    @property
    def tied(self) -> bool:
        """Whether embedding and head share their weight: the level above says so, whatever text_config repeats."""
        return bool(self.root.tie_word_embeddings)

    @property
    def deepstack_layers(self) -> int:
        """Decoder layers that features from within the vision tower are added after."""
        read = self.vision is not None and "deepstack_visual_indexes" in _known(type(self.vision))
        return len(self.vision.deepstack_visual_indexes) if read else 0

    @property
    def rotary(self) -> RotaryShape:
        """Rotary embedding of the part of each head that the config says, multimodal with an `mrope_section`."""
        axes = self.mrope_section
        sections = None if axes is None else list(self.text.rope_parameters.get("mrope_section", axes))
        interleaved = axes is not None and self.mrope_interleaved
        width, partial = head_width(self.text), self.partial_rotary
        return rotary_shape(self._decoder, width, partial=partial, sections=sections, interleaved=interleaved)

    @property
    def local_rotary(self) -> RotaryShape | None:
        """Rotary embedding of layers that see a window; None: that of all layers."""
        return None

    @property
    def embedding_scale(self) -> float:
        """Factor of tokens' embeddings."""
        return 1.0

    @property
    def logit_softcap(self) -> float | None:
        """c of logits that are capped, c tanh(logits / c); None: they are not."""
        return None

    def tower_costs(self) -> dict[str, TowerCost]:
        """What towers cost by name, a row being a patch: of a vision tower whose mergers make one embedding of a square.

        A family with other towers overrides it.
        """
        vision = self.vision
        if vision is None:
            return {}
        square = vision.spatial_merge_size**2
        width, merged = vision.hidden_size, vision.hidden_size * square
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        layers = vision.depth * (8.0 * width**2 + 4.0 * width * vision.intermediate_size)
        mergers = (1 + self.deepstack_layers) * 2.0 * merged * (merged + vision.out_hidden_size)
        per_row = 2.0 * patch * width + layers + mergers / square
        kept = vision.depth * (4.0 * width + 2.0 * vision.intermediate_size)
        kept += patch + 4.0 * width * (1 + self.deepstack_layers)
        per_pair, attended = 4.0 * width * vision.depth, width * vision.depth
        cost = TowerCost(
            per_row, per_pair, float(square), kept=kept, attended=attended, layers=vision.depth, ends=patch
        )
        return {"vision": cost}

    @property
    def further_decoders(self) -> Mapping[str, PretrainedConfig]:
        """Configs of decoders beside `text` that rules of the bridge name (`zoo.bridge.mapping.rules.Rule.part`), by these names."""
        return {}

    def mtp_layers(self, recipe: Recipe) -> int:
        """MTP layers to build: none where the recipe gives them no loss, as they serve training alone."""
        return getattr(self.text, "mtp_num_hidden_layers", 0) if recipe.train.mtp_loss else 0


def vocabulary_rows(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows of an embedding that has one for every id of the tokenizer: ids may leave some out."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def refusal(kind: str, lack: str) -> str:
    """What is said of a `model_type` in a family's `not_built`."""
    return f"model_type {kind!r} can't be trained here: {lack}"


class OmniConfig(FamilyConfig, ABC):
    """A transformers config of a whole model, read for training the thinker; `kinds` are the whole model's and the thinker's."""

    inner = "thinker_config"

    @classmethod
    def from_arch(cls, arch: JsonObject) -> Self:
        """From the dict of a config.json, of the whole model or of the thinker alone."""
        check_arch(arch)
        whole, thinker = cls.kinds
        if arch.get("model_type") == thinker:
            arch = {"model_type": whole, "enable_audio_output": False, "thinker_config": arch}
        return super().from_arch(arch)

    @property
    def thinker(self) -> PretrainedConfig:
        """The thinker's config: token ids, time scale, and the three parts'."""
        return self.root

    @abstractmethod
    def audio_tokens(self, frames: int) -> int:
        """Embeddings that the audio tower makes of a clip of so many mel frames."""


class TalkerConfig(FamilyConfig, ABC):
    """The `talker_config` of a whole model; `text` is its decoder."""

    width: ClassVar[str]  # its key of the thinker's hidden_size
    hertz: ClassVar[float]  # frames of a second's speech
    opening: ClassVar[int]  # tokens between question and frames that are none of the row's

    @property
    def codebooks(self) -> int:
        """Codes of a frame."""
        return 1

    @property
    def residual(self) -> PretrainedConfig | None:
        """That of the decoder of a frame's residual codes; None where there is one codebook."""
        return None

    @property
    @abstractmethod
    def projection(self) -> Projection:
        """What makes the thinker's embeddings as wide as the talker's states."""


class SpeakingConfig(OmniConfig):
    """A transformers config of a whole model: the thinker, and the talker where the whole model has one."""

    talks: ClassVar[type[TalkerConfig]]  # the family's config of a talker
    voice_defaults: ClassVar[Mapping[str, Any]] = {}  # of transformers' `generate`, if not `Voice`'s

    @cached_property
    def talker(self) -> TalkerConfig | None:
        """The talker's config; None where the model does not speak."""
        return self.talks(self.hf.talker_config) if self.hf.enable_audio_output else None

    @property
    def accepted(self) -> int:
        """The thinker's layer whose states the talker reads, counted from 1; the last one's number: what the final norm gives."""
        return int(self.text.num_hidden_layers)

    def checked_talker(self) -> TalkerConfig:
        """The config of a talker to be trained; UserError where there is none, or for what is not built of it."""
        talker = self.talker
        if talker is None:
            raise UserError(
                "train.speech_loss: the model has no talker (enable_audio_output of its config.json is false); start from a checkpoint of "
                "the whole model"
            )
        talker.check()
        if (width := getattr(talker.hf, talker.width)) != self.text.hidden_size:
            raise UserError(
                f"talker_config.{talker.width} is {width}; wanted the thinker's hidden_size {self.text.hidden_size}"
            )
        return talker

    @property
    @abstractmethod
    def speech_tokens(self) -> SpeechTokens:
        """Ids of the talker's sequences."""

    @abstractmethod
    def build_vocoder(self) -> tuple[torch.nn.Module, str, int]:
        """transformers' module that makes sound of codes, what its tensors' names begin with, and Hz; UserError where the model does not speak.

        Its `waveform` makes samples (N,) of codes (F, codebooks) int64, with what `SpeechCodes.voice` gives.
        """

    @property
    def further_decoders(self) -> Mapping[str, Any]:
        """The talker's."""
        return {} if self.talker is None else {"talker": self.talker.text}


class WindowedConfig(FamilyConfig):
    """A decoder with sliding and full layers, each kind with its rotary embedding (Gemma 3 and later); norms and embeddings are Gemma's."""

    sliding: ClassVar[bool] = True
    traits: ClassVar[tuple[str, ...]] = ("qk_norm", "zero_centered", "sandwich_norms")

    @property
    def rotary(self) -> RotaryShape:
        """The angles of layers that see all earlier tokens."""
        full = full_heads(self.text)
        return rotary_shape(self._decoder, full.width if full else head_width(self.text), "full_attention")

    @property
    def local_rotary(self) -> RotaryShape:
        """The angles of layers that see a window."""
        return rotary_shape(self._decoder, head_width(self.text), "sliding_attention")

    @property
    def embedding_scale(self) -> float:
        """Factor of tokens' embeddings."""
        return float(self.text.hidden_size) ** 0.5


def tower_config(part: Any) -> Any:
    """A copy of a tower's config that names no dtype: transformers would build the tower in the file's, not in the run's."""
    part = copy.copy(part)
    if part is not None:
        part.dtype = None
    return part


def _known(kind: type[PretrainedConfig]) -> set[str]:
    """The keys that a transformers config has of its own, under either name."""
    return {*(field.name for field in fields(kind)), *kind.attribute_map.values()}


def _as_read(part: PretrainedConfig, further: tuple[str, ...]) -> PretrainedConfig:
    """A copy of a config without what its models never look at."""
    seen = copy.copy(part)
    for name in set(vars(part)) - _known(type(part)) - set(further):
        if not name.startswith("_"):
            delattr(seen, name)
    return seen


def _computed_here(arch: JsonObject) -> JsonObject:
    """The arch without the keys in EXECUTION, in each of its parts."""
    return {
        key: _computed_here(value) if isinstance(value, dict) else value
        for key, value in arch.items()
        if key not in EXECUTION
    }
