"""Packages that megatron-core and transformers import where they are installed, imported at the first call of their functions.

Wherever vLLM or SGLang is installed too, so is flashinfer: megatron-core's inference, which zoo never calls, spends nine CPU seconds on it,
and fails where flashinfer itself fails to import.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType

_INFERENCE = "megatron.core.inference."
_OF_INFERENCE = {"flashinfer": ("mxfp8_quantize", "mm_mxfp8")}  # module -> functions that are imported by name


class _InferenceFinder:
    """Finds modules of megatron-core's inference, and runs their code with stand-ins for the packages that they try to import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name.startswith(_INFERENCE) else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_deferred(module: ModuleType) -> None:
            with imported_at_call(_OF_INFERENCE):
                execute(module)

        setattr(spec.loader, "exec_module", execute_deferred)  # noqa: B010  # mypy refuses the assignment to a method
        return spec


def defer_imports_of_inference() -> None:
    """Let modules of megatron-core's inference, from now on, import flashinfer at the first use of it. A second call does nothing."""
    if not any(isinstance(finder, _InferenceFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _InferenceFinder())


@contextmanager
def imported_at_call(functions: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Stand-ins inside the block for modules that are installed and not imported yet, each with some of its functions."""
    stand_ins = {
        name: _stand_in(name, called)
        for name, called in functions.items()
        if name not in sys.modules and find_spec(name.partition(".")[0])
    }
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, stand_in in stand_ins.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]


def _stand_in(name: str, functions: Sequence[str]) -> ModuleType:
    """A module whose functions import the module `name` and call that one's; other names are the imported one's own."""
    module = ModuleType(name)

    def attribute(wanted: str) -> object:
        if wanted.startswith("__"):  # whoever looks through all modules asks for their files
            raise AttributeError(wanted)
        if sys.modules.get(name) is module:
            del sys.modules[name]
        return getattr(importlib.import_module(name), wanted)

    def caller(function_name: str) -> object:
        def call(*args: object, **options: object) -> object:
            function = attribute(function_name)
            assert callable(function)
            return function(*args, **options)

        return call

    vars(module).update({function: caller(function) for function in functions}, __getattr__=attribute)
    return module
