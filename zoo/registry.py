"""Model families by name.

A family is a package with a `FAMILY` value in its `__init__`: the ones of this repository are the
sub-packages of :mod:`zoo.models`, others announce themselves by an entry point of the group
`zoo.families` (name -> ``package:FAMILY``). The value names its parts as ``module:attribute``, so that
listing families imports no torch. `imported` finds users' own functions and classes by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path
from typing import Any

from zoo.errors import UserError, printable
from zoo.files import expanded
from zoo.user_code import calling


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
    proved: tuple[str, ...] = ()  # of tp, sp, pp, vpp, cp, ep, etp, dp: what a test holds to one rank's gradients
    inner: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parts within others, which include them unless a recipe names them: name -> prefixes of their parameters' names."""
    mtp: tuple[str, int] = (
        "mtp_num_hidden_layers",
        0,
    )  # key of the language model's config that has the number of MTP layers, and the number of one without the key

    @property
    def all_parts(self) -> tuple[str, ...]:
        """What `model.freeze`, `train.lr_scale`, `lora.parts` and, but for the language model, `lora.whole_parts` accept."""
        return (*self.parts, *self.inner)

    def part_of(self, parameter: str, named: Collection[str] = ()) -> str:
        """The part of the model, as `model.freeze` calls it, that a parameter of that name belongs to.

        Args:
            named: parts that a recipe names (`Recipe.named_parts`): an inner part among them is no part of another one then.
        """
        name = parameter.removeprefix("module.module.").removeprefix("module.")
        for part, prefixes in self.inner.items():
            if part in named and name.startswith(prefixes):
                return part
        first = name.split(".", 1)[0]
        return first if first in self.parts else "language"

    def within(self, part: str) -> str:
        """The part that an inner one is in."""
        return self.inner[part][0].split(".", 1)[0]

    def load(self, part: str) -> Any:
        """The object behind `part` (config, model, step, bridge or processor), imported now."""
        module, _, attribute = getattr(self, part).partition(":")
        return attrgetter(attribute)(importlib.import_module(module))


class UnknownFamilyError(UserError):
    """A family name that no installed package registers."""


def families() -> dict[str, ModelFamily]:
    """All families: those of `zoo.models` and those of installed packages, by name."""
    by_name: dict[str, ModelFamily] = {}
    for info in pkgutil.iter_modules(importlib.import_module("zoo.models").__path__):
        family = importlib.import_module(f"zoo.models.{info.name}").FAMILY
        by_name[family.name] = family
    for entry in entry_points(group="zoo.families"):
        family = entry.load()
        by_name[family.name] = family
    return by_name


def get_family(name: str) -> ModelFamily:
    """The family called `name`; raises UnknownFamilyError that names the nearest ones."""
    known = families()
    if name not in known:
        near = get_close_matches(name, known, n=2) or sorted(known)
        raise UnknownFamilyError(f"model.family: no family {name!r}; nearest: {', '.join(near)}")
    return known[name]


def imported(name: str, key: str) -> Any:
    """What a name stands for. A module is looked for in the folder that zoo was started in, too.

    Args:
        name: `module:function`, `module:Class.method`, or a file (`folder/my_file.py:function`).
        key: the recipe's key or the option that names it, for messages.

    Raises:
        UserError: there is no such module or function, or importing it fails.
    """
    module, _, path = name.partition(":")
    folder = str(Path.cwd())
    there = folder in sys.path
    if not there:  # a command such as `zoo` does not look there by itself
        sys.path.insert(0, folder)
    try:
        with calling(f"{key}={printable(name, 100)}"):
            value: Any = _of_file(module) if module.endswith(".py") else importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except Exception as error:  # of the user's module, whatever it raises
        reason = printable(f"{type(error).__name__}: {error}", 300)
        raise UserError(
            f"{key}={printable(name, 100)}: it can't be imported from {folder} or from an installed package ({reason})"
        ) from error
    finally:
        if not there and folder in sys.path:
            sys.path.remove(folder)
    return value


def _of_file(name: str) -> Any:
    """The module that a file holds, under a name that is no other module's."""
    path = expanded(name)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"zoo_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
