"""`zoo new-family` lays out files whose tests fail and say what to fill in, and pass once that is done."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import python

from zoo.cli.main import main
from zoo.errors import UserError
from zoo.tools.new_family import lay_out

REPO = Path(__file__).parents[2]
TOY = REPO / "examples" / "toy_lm"
TINY = """{
    "model_type": "qwen3", "vocab_size": 384, "hidden_size": 44, "intermediate_size": 52, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20, "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}"""
REASONS = (
    r"transformers has no model_type \['my_lm'\]",
    r"rules: there are none yet",
    r"tiny_config: give transformers' config|CONFIG: give the keys of a tiny config\.json",
)


def ran(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of Python in a folder whose packages come first."""
    return python("-m", *arguments, cwd=folder, timeout=600, PYTHONPATH=str(folder), HF_HUB_OFFLINE="1")


def fill_in(file: Path, *changes: tuple[str, str]) -> None:
    text = file.read_text()
    for before, after in changes:
        assert before in text, f"{file}: no {before}"
        text = text.replace(before, after)
    file.write_text(text)


def fill_in_qwen3(config: Path, bridge: Path) -> None:
    """What both layouts share: the parts of examples/toy_lm."""
    fill_in(config, ('kinds = ("my_lm",)', 'kinds = ("qwen3",)'), ("traits = ()", 'traits = ("qk_norm",)'))
    bridge.write_text((TOY / "bridge.py").read_text().replace("toy_lm", "my_lm"))


def assert_fails(done: subprocess.CompletedProcess[str], tests: int) -> None:
    """None of the tests passes, and every one says what is missing."""
    assert done.returncode == 1, done.stdout + done.stderr
    reasons = re.findall(r"^E  +(?:AssertionError|NotImplementedError): (.*)$", done.stdout, re.MULTILINE)
    assert len(reasons) >= tests and " passed" not in done.stdout, done.stdout[-3000:]
    assert all(any(re.search(known, reason) for known in REASONS) for reason in reasons), reasons
    assert all(any(re.search(known, reason) for reason in reasons) for known in REASONS), reasons


@pytest.mark.slow
def test_a_package_of_ones_own(tmp_path: Path) -> None:
    package = tmp_path / "package"
    done = ran(tmp_path, "zoo", "new-family", "my_lm", "--package", f"out={package}")
    assert done.returncode == 0 and f"wrote {package / 'pyproject.toml'}" in done.stdout, done.stderr
    metadata = package / "my_lm-0.1.dist-info"  # as pip leaves it
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-lm\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[zoo.families]\nmy_lm = my_lm:FAMILY\n")
    test = ("pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert_fails(ran(package, *test), 5)
    fill_in_qwen3(package / "my_lm" / "config.py", package / "my_lm" / "bridge.py")
    fill_in(package / "tests" / "test_my_lm.py", ("Any] = {}", f"Any] = {TINY}"))
    fill_in(package / "my_lm" / "recipe.yaml", ("model_type: my_lm", "model_type: qwen3"))
    done = ran(package, *test)
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout[-3000:]
    short = ("train.steps=2", "train.eval_rows=2", "nproc=1", "hardware=cpu", f"run.dir={tmp_path / 'run'}")
    done = ran(package, "zoo", "train", "recipe=my_lm/recipe.yaml", *short)
    assert done.returncode == 0 and (tmp_path / "run" / "export" / "config.json").is_file(), done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this one: links, but for what is written into."""
    root = tmp_path / "zoo_checkout"
    caches = shutil.ignore_patterns("__pycache__")
    for name in ("zoo", "models", "bridges", "recipes"):
        shutil.copytree(REPO / name, root / name, copy_function=os.symlink, ignore=caches)
    for name in ("models", "bridges", "recipes"):  # as setup.py maps them
        (root / "zoo" / name).symlink_to(root / name)
    for name in ("support", "parity"):
        no_tests = shutil.ignore_patterns("test_*", "__pycache__")
        shutil.copytree(REPO / "tests" / name, root / "tests" / name, ignore=no_tests)
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(REPO / name, root / name)
    return root


@pytest.mark.slow
def test_within_a_checkout(checkout: Path) -> None:
    done = ran(checkout, "zoo", "new-family", "my_lm")
    assert done.returncode == 0 and f"wrote {checkout / 'models/my_lm/config.py'}" in done.stdout, done.stderr
    test = ("pytest", "-q", "-m", "", "-p", "no:cacheprovider", "tests/parity/test_my_lm.py")
    assert_fails(ran(checkout, *test), 20)
    fill_in_qwen3(checkout / "models" / "my_lm" / "config.py", checkout / "bridges" / "my_lm.py")
    fill_in(
        checkout / "tests" / "support" / "tiny_my_lm.py",
        ('MODEL = "MyLmForCausalLM"', 'MODEL = "Qwen3ForCausalLM"'),
        (
            "    raise NotImplementedError(FILL_IN)  # TODO\n",
            f"    from transformers import Qwen3Config\n\n    return Qwen3Config(**{TINY} | changes)\n",
        ),
    )
    done = ran(checkout, *test)
    assert done.returncode == 0 and " failed" not in done.stdout, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20
    fill_in(checkout / "recipes" / "sizes" / "my_lm" / "tiny.yaml", ("model_type: my_lm", "model_type: qwen3"))
    done = ran(checkout, "zoo", "show", "recipe=my_lm_sft", "size=tiny")
    assert done.returncode == 0 and "family: my_lm" in done.stdout, done.stderr


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("My_LM", "3d", "class", "my-lm", "../x"):
        with pytest.raises(UserError, match="wanted a Python name in lower case"):
            lay_out(name, tmp_path, package=True)
    with pytest.raises(UserError, match="there is a family of that name"):
        lay_out("qwen3", tmp_path, package=True)
    with pytest.raises(UserError, match="is no checkout of zoo; --package"):
        lay_out("my_lm", tmp_path, package=False)
    assert not list(tmp_path.iterdir())
    assert main(["new-family", "my_lm", "--package", "--vision", f"out={tmp_path}"]) == 0
    assert "VisionLanguageModel" in (tmp_path / "my_lm" / "__init__.py").read_text()
    with pytest.raises(UserError, match="there already; nothing was written"):
        lay_out("my_lm", tmp_path, package=True)
    assert main(["new-family"]) == 2 and "NAME missing" in capsys.readouterr().err


@pytest.mark.parametrize("vision", [False, True])
@pytest.mark.parametrize("package", [False, True])
def test_files_are_as_this_repository_has_them(package: bool, vision: bool, tmp_path: Path) -> None:
    """They pass the linter and its formatting, and no placeholder of a template is left."""
    (tmp_path / "tests" / "support").mkdir(parents=True)
    for name in ("__init__.py", "pairs.py"):
        (tmp_path / "tests" / "support" / name).write_text('"""A file of a checkout."""\n')
    for path in lay_out("my_lm", tmp_path, package=package, vision=vision):
        assert "$" not in path.read_text(), path
    for check in (("check",), ("format", "--check")):
        command = [sys.executable, "-m", "ruff", *check, "--config", str(REPO / "pyproject.toml"), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
