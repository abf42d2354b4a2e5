"""Private names of megatron-core are read in zoo/parallel/megatron alone, and are what zoo was written for."""

import ast
import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import megatron.core
import pytest
from megatron.core.tensor_parallel import random

REPO = Path(__file__).parents[4]
# Each with the parameters, and their defaults, by which zoo calls it or stands in for it.
SIGNATURES: list[tuple[Callable[..., Any], str]] = [
    (random._get_cuda_rng_state, "device='cuda', clone=False, graph_safe=False"),
    (random._set_cuda_rng_state, "new_state, device=-1, graph_safe=False"),
]


@pytest.mark.parametrize(("function", "wanted"), SIGNATURES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_signature_is_the_one_that_zoo_calls(function: Callable[..., Any], wanted: str) -> None:
    found = [
        one.name if one.default is one.empty else f"{one.name}={one.default!r}"
        for one in inspect.signature(function).parameters.values()
    ]
    assert ", ".join(found) == wanted


@cache
def private_of_megatron() -> frozenset[str]:
    """Private functions and methods that megatron-core defines, without those that zoo defines itself."""
    defined = re.compile(r"^\s*def (_[a-z]\w+)\(", re.MULTILINE)
    root = Path(megatron.core.__path__[0])
    theirs = {name for path in root.rglob("*.py") for name in defined.findall(path.read_text())}
    ours = {name for path in sources() for name in defined.findall(path.read_text()) if "megatron" not in path.parts}
    return frozenset(theirs - ours)


def sources() -> list[Path]:
    return [path for folder in ("zoo", "models", "bridges") for path in (REPO / folder).rglob("*.py")]


def private_names(text: str) -> set[str]:
    """Private names of megatron-core that a source reads as an attribute, imports, or has as a string."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found & private_of_megatron()


def test_one_room_reads_private_names() -> None:
    inside = REPO / "zoo/parallel/megatron"
    read = {path: names for path in sources() if (names := private_names(path.read_text()))}
    assert {str(path): names for path, names in read.items() if inside not in path.parents} == {}
    tested = {function.__name__ for function, _ in SIGNATURES}
    assert set().union(*read.values()) == tested


def test_private_names_are_seen() -> None:
    assert private_names("optimizer._synchronize_steps()") == {"_synchronize_steps"}
    assert private_names("patch.object(random, '_get_cuda_rng_state')") == {"_get_cuda_rng_state"}
    assert private_names("from x import _gather_along_first_dim") == {"_gather_along_first_dim"}
    assert private_names("self._start(1)") == set()
