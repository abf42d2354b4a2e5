"""FlashAttention 4 is asked to keep its kernels where it can, and only there."""

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zoo.engine.kernel_cache import keep_kernels

ENABLED, DIR = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were installed, a cache of the test's own, and nothing said yet."""
    spec = importlib.machinery.ModuleSpec("flash_attn", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "flash_attn" else None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (ENABLED, DIR):
        monkeypatch.setenv(name, "")  # which is put back at the end
        monkeypatch.delenv(name)


def test_kernels_are_kept(tmp_path: Path) -> None:
    keep_kernels()
    keep_kernels()
    assert os.environ[ENABLED] == "1"
    folder = Path(os.environ[DIR])
    assert folder.is_dir() and folder.is_relative_to(tmp_path / "cache")


def test_not_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    keep_kernels()
    assert ENABLED not in os.environ and DIR not in os.environ


def test_not_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    keep_kernels()
    assert ENABLED not in os.environ


def test_not_where_files_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    keep_kernels()
    assert ENABLED not in os.environ


def test_what_the_environment_says_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLED, "0")
    keep_kernels()
    assert os.environ[ENABLED] == "0" and DIR not in os.environ


def test_it_is_said_before_megatron_core_is_imported(tmp_path: Path) -> None:
    """With Transformer Engine that imports FlashAttention 4, which reads it then."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'megatron.core':\n"
        f"            print(os.environ.get('{ENABLED}'))\n"
        "            raise SystemExit\n"
        "sys.meta_path.insert(0, Watch())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import zoo.engine.loop"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "1\n", done.stderr
