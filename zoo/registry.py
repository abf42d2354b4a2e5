"""Model families by name.

A family is a package with a `FAMILY` value in its `__init__`: the ones of this repository are the
sub-packages of :mod:`zoo.models`, others announce themselves by an entry point of the group
`zoo.families` (name -> ``package:FAMILY``). The value names its parts as ``module:attribute``, so that
listing families imports no torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

from zoo.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """What the framework needs to know of a family; parts are ``module:attribute`` strings."""

    name: str  # what users type as model.family
    title: str  # the name people know
    modalities: tuple[str, ...]  # of: text, image, video, audio
    parts: tuple[str, ...]  # names that model.freeze accepts
    config: str  # () -> class with from_arch(dict), from_folder(folder): see zoo.nn.family.FamilyConfig
    model: str  # (config, recipe, stage) -> torch.nn.Module
    step: str  # PackedStep subclass
    bridge: str  # zoo.bridge.Bridge: mapping table to Hugging Face names
    processor: str  # (config, source folder or None) -> zoo.data.Processor
    proved: tuple[
        str, ...
    ] = ()  # of tp, sp, pp, vpp, cp, ep, etp, dp: what a test holds to one rank's gradients

    def part_of(self, parameter: str) -> str:
        """The part of the model, as `model.freeze` calls it, that a parameter of that name belongs to."""
        first = parameter.removeprefix("module.module.").removeprefix("module.").split(".", 1)[0]
        return first if first in self.parts else "language"

    def load(self, part: str) -> Any:
        """The object behind `part` (config, model, step, bridge or processor), imported now."""
        module, _, attribute = getattr(self, part).partition(":")
        return getattr(importlib.import_module(module), attribute)


class UnknownFamilyError(UserError):
    """A family name that no installed package registers."""


def families() -> dict[str, ModelFamily]:
    """All families: those of `zoo.models` and those of installed packages, by name."""
    found: dict[str, ModelFamily] = {}
    for info in pkgutil.iter_modules(importlib.import_module("zoo.models").__path__):
        family = importlib.import_module(f"zoo.models.{info.name}").FAMILY
        found[family.name] = family
    for entry in entry_points(group="zoo.families"):
        family = entry.load()
        found[family.name] = family
    return found


def get_family(name: str) -> ModelFamily:
    """The family called `name`; raises UnknownFamilyError that names the nearest ones."""
    known = families()
    if name not in known:
        near = get_close_matches(name, known, n=2) or sorted(known)
        raise UnknownFamilyError(f"model.family: no family {name!r}; nearest: {', '.join(near)}")
    return known[name]
