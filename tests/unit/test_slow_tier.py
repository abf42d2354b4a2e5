"""What only slow tests, GPU tests and the documentation use is still there: imported, armed, and asked for its options.

Collecting imports every test file, also those whose tests are left out here; what stands inside functions it does not.
"""

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted({*ROOT.glob("tests/**/*.py"), *ROOT.glob("docs/**/*.py")})
OURS = ("zoo", "support")
SCRIPTS = [
    path for path in FILES if {"import argparse", 'if __name__ == "__main__":'} <= {*path.read_text().split("\n")}
]


def sources(path: Path) -> Iterator[ast.AST]:
    """The file, and the programs that it holds as texts."""
    tree = ast.parse(path.read_text())
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " import " in node.value:
            try:
                yield ast.parse(textwrap.dedent(node.value))
            except SyntaxError:  # a sentence, or a piece of a program
                continue


def imported(path: Path) -> set[tuple[str, str]]:
    """(module, name in it or "") of zoo's and the tests' own that a file imports anywhere."""
    found = set()
    for source in sources(path):
        for node in ast.walk(source):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                if node.module.split(".")[0] in OURS:
                    found |= {(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names if alias.name.split(".")[0] in OURS}
    return found


def problems(wanted: set[tuple[str, str]]) -> Iterator[str]:
    for module, name in sorted(wanted):
        try:
            found = importlib.import_module(module)
            if name and not hasattr(found, name):
                importlib.import_module(f"{module}.{name}")
        except ImportError as error:
            if (error.name or "").split(".")[0] in OURS:  # not a package for GPUs that is missing here
                yield f"from {module} import {name}: {error}"


@pytest.mark.parametrize("room", ["cli", "distributed", "gpu", "parity", "slow", "support", "docs", "unit", "fuzz"])
def test_whatever_is_imported_anywhere_is_there(room: str) -> None:
    files = [path for path in FILES if room in path.relative_to(ROOT).parts]
    assert files
    found = {str(path.relative_to(ROOT)): list(problems(imported(path))) for path in files}
    assert not {path: faults for path, faults in found.items() if faults}


def test_a_name_that_is_gone_is_found(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    save, nothing, gone = ("zoo.checkpoint.loading|save", "zoo.training.nothing", "zoo.launch.rank_main|gone")
    first, last = (f"from {name.replace('|', ' import ')}" for name in (save, gone))
    path.write_text(f'def f():\n    {first}\n    import {nothing}\nPROGRAM = "\\n    {last}\\n"\n')
    assert len(list(problems(imported(path)))) == 3


def test_every_fault_strikes_at_something_that_is_there() -> None:
    spec = importlib.util.spec_from_file_location("faults", ROOT / "tests/support/faults/sitecustomize.py")
    assert spec is not None and spec.loader is not None
    faults = importlib.util.module_from_spec(spec)
    sys.modules["faults"] = faults
    try:
        spec.loader.exec_module(faults)
        for kind in faults.FAULTS:
            disarm = faults.arm(kind)
            disarm()
        faults.FAULTS["gone"] = faults.Fault("zoo.checkpoint.loading:save", faults.fail)
        with pytest.raises(AttributeError, match="save"):
            faults.arm("gone")
    finally:
        del sys.modules["faults"]


def test_every_kind_that_a_test_asks_for_is_known() -> None:
    text = (ROOT / "tests/support/faults/sitecustomize.py").read_text()
    known = {*re.findall(r'^    "([a-z-]+)": Fault\(', text, re.MULTILINE)}
    asked = {
        kind
        for path in FILES
        for kinds in re.findall(r'"(?:all|\d+) \d+ ([a-z,-]+)"', path.read_text())
        for kind in kinds.split(",")
    }
    assert asked and asked <= known, asked - known


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_tell_their_options(script: Path) -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), "--help"], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "usage:" in done.stdout, done


def test_files_that_the_documentation_runs_are_there() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *FILES]
    named = {
        name
        for page in pages
        for name in re.findall(r"(?:python|pytest)3? (?:-[a-z] )*((?:tests|docs|scripts)/[\w/.-]+)", page.read_text())
    }
    assert named and not {name for name in named if not (ROOT / name.rstrip(".:")).exists()}
