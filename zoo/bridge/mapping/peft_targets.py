"""What has an adapter: modules by PEFT's names, of two versions of transformers; ranks and scales by PEFT's patterns; which can have DoRA."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from zoo.bridge.mapping.table import Entry
from zoo.bridge.mapping.transforms import Dims
from zoo.errors import UserError
from zoo.types import JsonMapping, JsonObject

PREFIX = "base_model.model."
# PEFT takes modules so called for experts, in models with experts.
EXPERTS_OF_OLD = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Renames:
    """Names of modules in later transformers, where it renamed some.

    An adapter says what it is of under both names and holds its tensors under both: PEFT takes those that its model has, without a
    word where there are none, and servers go by the former ones.
    """

    prefixes: Mapping[str, str] = field(default_factory=dict)  # later ones of modules, by the former

    def both(self, name: str) -> list[str]:
        """A module's name, or PEFT's of a tensor, and the later one where there is one."""
        root, name = (PREFIX, name.removeprefix(PREFIX)) if name.startswith(PREFIX) else ("", name)
        later = [to + name.removeprefix(former) for former, to in self.prefixes.items() if name.startswith(former)]
        return [root + each for each in (name, *later)]

    def former(self, name: str) -> str:
        """The inverse of `both`, of either name."""
        root, name = (PREFIX, name.removeprefix(PREFIX)) if name.startswith(PREFIX) else ("", name)
        for former, later in self.prefixes.items():
            if name.startswith(later):
                return root + former + name.removeprefix(later)
        return root + name

    def all(self, names: Iterable[str]) -> list[str]:
        """`both` of several."""
        return [each for name in names for each in self.both(name)]

    def config(self, config: JsonMapping) -> JsonObject:
        """adapter_config.json with both names, out of one with the former ones."""
        named = ("target_modules", "target_parameters", "modules_to_save")
        patterns = ("rank_pattern", "alpha_pattern")
        both = {key: {each: n for name, n in config[key].items() for each in self.both(name)} for key in patterns}
        return {**config, **both, **{key: sorted(self.all(config[key])) for key in named if config[key]}}


SAME = Renames()


@dataclass(frozen=True)
class Target:
    """A zoo weight, the transformers modules (or the stacked parameter) that it is, and which of these have an adapter."""

    zoo: str
    entry: Entry
    modules: tuple[str, ...]
    published: tuple[str, ...]  # the same ones by the names of the hub's weights
    chosen: tuple[bool, ...]
    ranks: tuple[int, ...] = ()  # of `named`
    scales: tuple[float, ...] = ()

    @property
    def rank(self) -> int:
        """The one that a part of `a` has rows of."""
        return max(self.ranks)

    @property
    def stacked(self) -> bool:
        """Whether it is a stack of experts."""
        return self.entry.rule.stacked

    @property
    def named(self) -> list[str]:
        """The modules that have an adapter."""
        return [module for module, chosen in zip(self.modules, self.chosen, strict=True) if chosen]

    @property
    def published_by_name(self) -> dict[str, str]:
        """The published names of `named`."""
        return {
            name: hub_name
            for name, hub_name, chosen in zip(self.modules, self.published, self.chosen, strict=True)
            if chosen
        }

    def owner(self, shape: Sequence[int], dims: Dims) -> Tensor:
        """(out,) of the full weight: which of `named` each row belongs to, -1 where it has no adapter."""
        if self.stacked:
            return torch.zeros(shape[1], dtype=torch.long)
        numbers = itertools.count()
        sizes = [part[0] for part in self.entry.hf_shapes(shape, dims).values()]
        owners = [next(numbers) if chosen else -1 for chosen in self.chosen]
        parts = [torch.full((size, 1), owner) for size, owner in zip(sizes, owners, strict=True)]
        return self.entry.layout.transform.to_zoo(parts, dims)[:, 0]


@dataclass(frozen=True)
class Sizes:
    """Rank and alpha of every module, as a recipe's `lora` or an adapter_config.json has them.

    A pattern is a regular expression of the end of a module's name, from a dot on; the first that matches counts. Experts go by
    the name of the stacked parameter (`mlp.experts.down_proj`).
    """

    rank: int
    alpha: float
    rslora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    renames: Renames = SAME

    def sized(self, target: Target) -> Target:
        """A target with the rank and scale of each of `named`."""
        pairs = [self.named(name) for name in target.named]
        scales = [alpha / (math.sqrt(rank) if self.rslora else rank) for rank, alpha in pairs]
        return replace(target, ranks=tuple(rank for rank, _ in pairs), scales=tuple(scales))

    def named(self, name: str) -> tuple[int, float]:
        """Rank and alpha of a module or stacked parameter."""
        names = self.renames.both(name)
        return _matching(self.ranks, names, self.rank), _matching(self.alphas, names, self.alpha)

    def refuse_unmatched(self, everywhere: Sequence[str]) -> None:
        """UserError where a pattern matches none of these linears and parameters of experts."""
        names = self.renames.all(everywhere)
        for key, patterns in (("rank_pattern", self.ranks), ("alpha_pattern", self.alphas)):
            for pattern in patterns:
                if not any(_matches(pattern, name) for name in names):
                    raise UserError(
                        f"lora.{key}={{{pattern}: ...}}: no linear of lora.parts has a name that ends so; wanted a regular expression "
                        f"of the end of one, such as {everywhere[0].rpartition('.')[2] if everywhere else 'q_proj'}"
                    )


def _matching[Value](patterns: Mapping[str, Value], names: Sequence[str], default: Value) -> Value:
    return next((patterns[key] for key in patterns for name in names if _matches(key, name)), default)


def _matches(pattern: str, name: str) -> bool:
    """As in PEFT."""
    try:
        return re.match(rf"(.*\.)?({pattern})$", name) is not None
    except re.error as error:
        raise UserError(f"{pattern}: no regular expression ({error}); wanted the end of a module's name") from None


def refuse_without_dora(targets: Iterable[Target], *, has_experts: bool) -> None:
    """UserError where PEFT has no DoRA of a target: experts, and in models with some what is called as older ones' were."""
    for target in targets:
        for name in target.named:
            if target.stacked or (has_experts and name.endswith(EXPERTS_OF_OLD)):
                raise UserError(
                    f"lora.dora=true: PEFT has no DoRA of {name}; name other linears, lora.targets=[q_proj,k_proj,v_proj,o_proj] say"
                )
