"""`make check`: which tests it runs after a change, and faults that it must find."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPO / f"scripts/{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


faults = script("plant_faults")


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return script("check")


def test_the_closest_tests_come_first(check: ModuleType) -> None:
    texts = {
        "zoo/packing/__init__.py": "from zoo.packing.layout import PackedLayout\n",
        "zoo/packing/layout.py": "from zoo.packing import (\n    index,\n)\n",
        "zoo/packing/index.py": "import torch\n",
        "models/llava/step.py": "from zoo.packing import PackedLayout\n",
        "tests/unit/packing/test_index.py": "",
        "tests/unit/packing/test_masks.py": "",
        "tests/parity/test_index.py": "def f():\n    from zoo.packing import index\n",
        "tests/parity/test_layouts.py": "import zoo.packing\n",
        "tests/parity/test_llava.py": "",
        "tests/unit/config/test_hub.py": "",
    }
    distances = check.distances(["zoo/packing/index.py"], texts)
    assert distances == {
        "tests/unit/packing/test_index.py": 1,
        "tests/parity/test_index.py": 2,
        "tests/unit/packing/test_masks.py": 3,
        "tests/parity/test_layouts.py": 5,
        "tests/parity/test_llava.py": 6,
    }
    assert check.distances(["tests/unit/config/test_hub.py"], texts) == {"tests/unit/config/test_hub.py": 0}


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("recipes/families/llava.yaml", "tests/parity/test_llava.py"),
        ("bridges/qwen3_vl.py", "tests/parity/test_qwen3_vl.py"),
        ("docs/packing.md", "tests/unit/test_docs.py"),
        ("scripts/check.py", "tests/unit/test_check.py"),
        ("tests/support/pairs.py", "tests/parity/test_gemma3.py"),
        ("tests/support/warm_zoo.py", "tests/unit/test_check.py"),  # which names it here
    ],
)
def test_a_change_of_any_kind_reaches_tests(check: ModuleType, file: str, test: str) -> None:
    assert test in check.closest([file])


def test_every_module_reaches_tests(check: ModuleType) -> None:
    for folder in ("zoo", "models", "bridges"):
        for path in (REPO / folder).rglob("*.py"):
            assert check.mirror(path.relative_to(REPO).as_posix()).startswith("tests/unit/")
    assert check.closest(["zoo/packing/layout.py"])[0] == "tests/unit/packing/test_layout.py"


@pytest.mark.parametrize("name", faults.FAULTS)
def test_lines_of_planted_faults_are_there(name: str) -> None:
    assert faults.FAULTS[name].path(REPO).is_file()


@pytest.mark.slow(minutes=10)
@pytest.mark.parametrize("name", faults.FAULTS)
def test_planted_faults_are_found(name: str, tmp_path: Path) -> None:
    faults.copy(tmp_path)
    _, failed, output = faults.check(faults.FAULTS[name], tmp_path)
    assert failed, output
