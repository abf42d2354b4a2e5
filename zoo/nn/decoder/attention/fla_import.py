"""Modules of flash-linear-attention without the rest of it.

`import fla` and that of any of its modules import all of its layers and models, and by them TorchDynamo and TorchInductor: 3.7 of
a start's CPU seconds. The gated delta rule alone needs some sixty modules, in 0.15 s.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

from zoo.errors import UserError
from zoo.packages import installed_version

PACKAGES = ("fla", "fla.ops", "fla.modules")  # whose own code imports what they hold
DISTRIBUTIONS = ("flash-linear-attention", "fla-core")


def import_fla(name: str) -> Any:
    """A module of flash-linear-attention, imported as any other where something else has imported the library before.

    Raises:
        ImportError: there is no such module.
        UserError: the library fails as it is imported, or a package that it imports where it is installed, such as TileLang.
    """
    try:
        return _import(name)
    except (ImportError, AttributeError):
        raise
    except Exception as error:
        raise UserError(
            f"flash-linear-attention can't be imported: {type(error).__name__}: {error}; `pip check` names packages that don't fit "
            f"one another; or set engine.delta_rule=torch, which is several times slower"
        ) from error


def _import(name: str) -> Any:
    if "fla" in sys.modules:
        return importlib.import_module(name)
    try:
        for package in PACKAGES:
            _without_code(package)
        return importlib.import_module(name)
    except (ImportError, AttributeError):  # of a release that is laid out otherwise
        for module in [imported for imported in sys.modules if imported.partition(".")[0] == "fla"]:
            del sys.modules[module]
        return importlib.import_module(name)


class _Package(ModuleType):
    """A package whose own code runs when something of it is asked for that no import has put there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None and self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _without_code(name: str) -> ModuleType:
    """The package, put among the imported modules without running it."""
    spec = find_spec(name)
    if spec is None:
        raise ImportError(name)
    module = module_from_spec(spec)
    module.__class__ = _Package
    module.__path__ = pkgutil.extend_path(module.__path__, name)
    parent, _, last_name = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last_name, module)
    else:
        if (version := installed_version(*DISTRIBUTIONS)) is not None:
            module.__version__ = version  # type: ignore[attr-defined]
    sys.modules[name] = module
    return module
