"""`make check`: which tests a change touches."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check", REPO / "scripts/check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("zoo/packing/layout.py", "zoo.packing.layout"),
        ("zoo/packing/__init__.py", "zoo.packing"),
        ("models/llava/step.py", "zoo.models.llava.step"),
        ("bridges/llava.py", "zoo.bridges.llava"),
    ],
)
def test_modules_of_files(check: ModuleType, name: str, module: str) -> None:
    assert check.module(name) == module


def test_tests_that_a_change_touches(check: ModuleType) -> None:
    unit = list((REPO / "tests/unit").rglob("test_*.py"))
    assert "tests/unit/packing/test_layout.py" in check.touched(["zoo/packing/layout.py"], unit)
    assert check.touched(["docs/packing.md"], unit) == ["tests/unit/test_docs.py"]
    assert check.touched(["tests/parity/test_llava.py"], unit) == ["tests/parity/test_llava.py"]
    assert "tests/unit/test_turns.py" in check.touched(["tests/support/turns.py"], unit)
    assert check.touched([], unit) == []
