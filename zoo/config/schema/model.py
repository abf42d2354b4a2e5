"""Keys of the model: its weights, adapters, and a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from zoo.config.layers.keys import ALWAYS, number, section, setting
from zoo.config.schema import conditions

# A key and its default with the bounds of a number stay on one line.
# fmt: off


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class ModelConfig:
    """Which model, and where its weights come from."""

    family: str = setting("", when=ALWAYS)
    """a name that `zoo list` shows; a recipe sets it"""
    init: str = setting("random", when=ALWAYS)
    """random | a Hugging Face folder | a hub id"""
    arch: dict[str, Any] = setting(dict, when=ALWAYS)
    """Hugging Face config of the architecture (from size=)"""
    resize_embeddings: bool = setting(False, when=conditions.WEIGHTS)
    """where the tokenizer of model.init has ids beyond the embedding: add rows to embedding and head, each the mean of those there"""
    freeze: list[str] = setting(list, when=ALWAYS)
    """parts of the family that are not trained, such as vision, or merger alone"""


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class LoraConfig:
    """Low-rank adapters: they alone are trained, but for parts named in whole_parts, and are exported in PEFT's format."""

    rank: int = number(0, 0, 10**5, when=ALWAYS)
    """width of the adapters; 0: none, the model's own weights are trained"""
    alpha: float = number(32.0, above=0, most=1e6, when=conditions.ADAPTERS)
    """an adapter's output is multiplied by alpha / rank"""
    dropout: float = number(0.0, 0, below=1, when=(conditions.ADAPTERS, conditions.DENSE_ADAPTERS))
    """dropout of an adapter's input; experts have none, and losses of preferences leave it out"""
    keep_dropout: bool = setting(False, when=(conditions.ADAPTERS, conditions.PAIRS_OR_LABELS, conditions.DROPOUT))
    """losses of preferences keep dropout in the policy's pass, which the reference has none in"""
    targets: list[str] = setting(lambda: ["all-linear"], when=conditions.ADAPTERS)
    """names or regular expressions of linears; all-linear: all but experts (experts.gate_up_proj, ...)"""
    parts: list[str] = setting(lambda: ["language"], when=conditions.ADAPTERS)
    """parts of the model that targets are in"""
    whole_parts: list[str] = setting(list, when=conditions.ADAPTERS)
    """parts of the model that are trained whole beside the adapters (PEFT's modules_to_save), such as merger"""
    base_dtype: Literal["model", "fp8"] = setting("model", when=conditions.ADAPTERS, off="model")
    """how the decoder's frozen matrices are held: model (as engine.precision says) | fp8 (8 bits, 128 values of a row share a scale); made dense for each product"""
    init: str | None = setting(None, when=conditions.ADAPTERS)
    """adapter folder in PEFT's format to start from; default: new adapters"""


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class DistillConfig:
    """Learning from a teacher's distributions beside the labels (docs/distillation.md)."""

    teacher: str | None = setting(None, when=ALWAYS)
    """a model of the same family and tokens, as model.init names it, which is in memory beside the student, or a folder of its tokens (zoo score ... top_k=); null: none"""
    top_k: int = number(64, 1, 10**5, when=conditions.TEACHER)
    """of the teacher's most likely tokens that are told apart; the others are one outcome"""
    temperature: float = number(1.0, above=0, most=1e3, when=conditions.TEACHER)
    """at which both distributions are compared"""
    weight: float = number(0.5, 0, 1, when=conditions.TEACHER)
    """of the divergence in the loss; the cross entropy of the labels has the rest"""


# fmt: on
