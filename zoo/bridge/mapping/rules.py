"""Rules of the mapping language: a zoo parameter's name, the HF tensors it may be stored in, how ranks share it.

A pattern is a name with wildcards: `{layer}` (the global, 0-based layer index), `{expert}` (an expert's index)
and `{rest}` (any suffix, for whole towers copied by name). A zoo name never has `{expert}`: zoo stacks a layer's
experts in one tensor, and the rule's shard says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import torch

from zoo.bridge.mapping.transforms import Copy, Dims, GateUp, Transform

Shard = Literal["tp0", "tp1", "tp0-gateup", "expert1", "expert2"]
"""How ranks share a zoo tensor; None in a rule means that every rank has it whole.

tp0 rows, tp1 columns, tp0-gateup rows of the gate half then of the up half (all over TP); expert1 (weight1
[E, 2I, H]) and expert2 (weight2 [E, H, I]) give each EP rank a range of experts and cut I over ETP.
"""


@dataclass(frozen=True)
class Sections:
    """A shard of rows that lie in sections, each of which TP cuts by itself."""

    sizes: tuple[int, ...]  # rows of each section of the full tensor


@dataclass(frozen=True)
class PaddedRows:
    """A shard of rows that TP need not divide: equal parts, the last of which end in rows of zeros that nobody reads."""

    rows: int  # of the full tensor, without padding


ShardOf = Callable[[Dims], Shard | Sections | PaddedRows]  # where it depends on the architecture

_WILDCARDS = {"layer": r"(?P<layer>0|[1-9]\d*)", "expert": r"(?P<expert>0|[1-9]\d*)", "rest": r"(?P<rest>.+)"}


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A regular expression with one named group per wildcard of `pattern`."""
    parts = re.split(r"\{(\w+)\}", pattern)
    return re.compile("".join(_WILDCARDS[p] if i % 2 else re.escape(p) for i, p in enumerate(parts)))


@dataclass(frozen=True)
class Layout:
    """One way a checkpoint stores a zoo tensor: the HF name patterns and the transform that joins them.

    Under a rule that stacks experts, patterns with `{expert}` name one tensor per expert, and patterns without it
    name tensors whose first dimension is the expert; the transform joins the parts of one expert in both cases.
    """

    patterns: tuple[str, ...]
    transform: Transform = field(default_factory=Copy)

    @property
    def per_expert(self) -> bool:
        """True where each expert has tensors of its own."""
        return "{expert}" in self.patterns[0]

    def names(self, binding: Mapping[str, str], expert: int | None = None) -> list[str]:
        """The HF names for one zoo tensor (of one `expert`, where each has its own)."""
        return [pattern.format(**binding, expert=expert) for pattern in self.patterns]

    def all_names(self, binding: Mapping[str, str], experts: int) -> list[str]:
        """The HF names for one zoo tensor, of all its experts."""
        if not self.per_expert:
            return self.names(binding)
        return [name for expert in range(experts) for name in self.names(binding, expert)]


def per_expert_gate_up(experts: str) -> Layout:
    """`<experts>.{expert}.gate_proj.weight` and up_proj [I, H] -> weight1 [E, 2I, H], gate first."""
    names = (f"{experts}.{{expert}}.gate_proj.weight", f"{experts}.{{expert}}.up_proj.weight")
    return Layout(names, GateUp())


def per_expert_down(experts: str) -> Layout:
    """`<experts>.{expert}.down_proj.weight` [H, I] -> weight2 [E, H, I]."""
    return Layout((f"{experts}.{{expert}}.down_proj.weight",))


@dataclass(frozen=True)
class Rule:
    """One row of the table: a zoo name pattern and the HF layouts it may be stored in (the first is written).

    With `keeps_layout` several of them are published, and an export has the one that its source has.

    Layouts of the same names are told apart by their tensors' shapes; where these are equal, the first holds.
    """

    zoo: str
    layouts: tuple[Layout, ...]
    shard: Shard | ShardOf | None = None
    tied_to: str | None = None  # HF name that holds this tensor when Dims.tied; nothing of its own is written then
    keeps_layout: bool = False
    part: str = ""  # the further decoder whose experts it stacks (`Dims.parts`)

    def __post_init__(self) -> None:
        if self.shard is not None and not callable(self.shard) and self.shard not in get_args(Shard):
            raise ValueError(f"{self.zoo}: shard {self.shard!r} is none of {get_args(Shard)}")
        if self.keeps_layout and len({layout.patterns for layout in self.layouts}) < len(self.layouts):
            raise ValueError(f"{self.zoo}: layouts that are kept are known by their names, and two have the same")
        wanted = set(re.findall(r"\{(\w+)\}", self.zoo))
        for layout in self.layouts:
            for pattern in layout.patterns:
                if set(re.findall(r"\{(\w+)\}", pattern)) - {"expert"} != wanted:
                    raise ValueError(f"{self.zoo}: {pattern} has other wildcards")
            if layout.per_expert and not self.stacked:
                raise ValueError(f"{self.zoo}: {layout.patterns[0]} has experts, the rule's shard has none")

    @property
    def stacked(self) -> bool:
        """True where the zoo tensor's first dimension is the expert."""
        return self.shard in ("expert1", "expert2")

    def experts(self, dims: Dims) -> int:
        """How many experts the tensor stacks, where it does."""
        return (dims.parts[self.part] if self.part else dims).experts

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """Matches the zoo names of this rule."""
        return compile_pattern(self.zoo)

    def read_layouts(self, dims: Dims) -> tuple[Layout, ...]:
        """The layouts a checkpoint may have."""
        if self.tied_to is not None and dims.tied:
            return (Layout((self.tied_to,)),)
        return self.layouts

    def shard_for(self, dims: Dims) -> Shard | Sections | PaddedRows | None:
        """How ranks share the tensor in a model of these dims."""
        return self.shard(dims) if callable(self.shard) else self.shard

    def writes(self, dims: Dims) -> bool:
        """False where the tensor is stored under the tied one's name alone."""
        return self.tied_to is None or not dims.tied


def rule(zoo: str, *hf: str, transform: Transform | None = None, shard: Shard | ShardOf | None = None) -> Rule:
    """A rule with one layout; without a transform the single HF tensor is copied."""
    return Rule(zoo, (Layout(hf, transform or Copy()),), shard)


@dataclass(frozen=True)
class PublishedFP8:
    """What the folders of a family whose names end in -FP8 have in block-scaled FP8."""

    linears: tuple[str, ...]  # HF patterns of the matrices; all else stays in bf16
    single_experts: bool = True  # experts stand one by one there, whatever the folders in bf16 have
    scale: torch.dtype = torch.bfloat16  # of a block's scale

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        every = "|".join(compile_pattern(pattern).pattern for pattern in self.linears)
        return re.compile(re.sub(r"\?P<\w+>", "?:", every))

    def has(self, hf_name: str) -> bool:
        """Whether the published name is of a matrix in FP8."""
        return self._regex.fullmatch(hf_name) is not None
