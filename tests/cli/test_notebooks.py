"""The notebooks of examples/: their cells run one after the other, and none is committed with what it printed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.commands import python

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
MARK = "==== cell "
RUN_CELLS = f"""
import json, sys
names = {{"__name__": "__main__"}}
for number, source in enumerate(json.load(sys.stdin)):
    print({MARK!r} + str(number), flush=True)
    exec(compile(source, f"cell {{number}}", "exec"), names)
"""


def cells(path: Path) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return notebook["cells"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path: Path) -> None:
    found = cells(path)
    assert len({cell["id"] for cell in found}) == len(found)
    for cell in found:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
    assert [cell["cell_type"] for cell in found][:2] == ["markdown", "code"]


def printed(name: str, folder: Path, **changes: str) -> list[str]:
    """What each code cell prints, of a notebook in which some texts are others."""
    sources = ["".join(cell["source"]) for cell in cells(EXAMPLES / name) if cell["cell_type"] == "code"]
    for text, other in changes.items():
        assert any(text in source for source in sources)
        sources = [re.sub(rf"{text} = \d+", f"{text} = {other}", source) for source in sources]
    done = python("-c", RUN_CELLS, cwd=folder, text=json.dumps(sources), timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split(MARK)[1:]


@pytest.mark.slow
def test_training_on_digits(tmp_path: Path) -> None:
    found = printed("train_on_digits.ipynb", tmp_path, steps="20")
    assert '"role": "user"' in found[1]
    losses = re.search(r"20 steps, loss ([\d.]+) -> ([\d.]+)", found[2])
    assert losses is not None and float(losses[2]) < float(losses[1])
    assert (tmp_path / "runs" / "digits" / "plots" / "predictions.png").is_file()


@pytest.mark.slow
def test_converting_and_generating(tmp_path: Path) -> None:
    found = printed("convert_and_generate.ipynb", tmp_path)
    assert "equal: True" in found[2]
    assert re.search(r"'.*' (stop|length)", found[3]), found[3]
    assert found[4].count("wanted") == 3
    assert "1,322,304 parameters in transformers" in found[5]
