"""FlashAttention 4 and QuACK are asked to keep their kernels where they can, and only there."""

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zoo.launch import kernel_cache

ENABLED, DIR = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were installed beside a GPU, a cache of the test's own, and nothing said yet."""
    there = {name: importlib.machinery.ModuleSpec(name, None) for name in ("flash_attn", "quack")}
    monkeypatch.setattr(importlib.util, "find_spec", there.get)
    monkeypatch.setattr(kernel_cache, "gpu_capabilities", lambda: frozenset({(9, 0)}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (ENABLED, DIR, "QUACK_CACHE_ENABLED", "QUACK_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # which is put back at the end
        monkeypatch.delenv(name)


def both_caches_are_off() -> bool:
    """Whether both libraries are told to keep no kernels. QuACK has to be told, as its cache is on by default."""
    assert DIR not in os.environ and "QUACK_CACHE_DIR" not in os.environ
    return os.environ[ENABLED] == os.environ["QUACK_CACHE_ENABLED"] == "0"


def test_kernels_are_kept(tmp_path: Path) -> None:
    kernel_cache.keep_kernels()
    kernel_cache.keep_kernels()
    assert os.environ[ENABLED] == "1"
    assert os.environ["QUACK_CACHE_ENABLED"] == "1"
    folders = [Path(os.environ[name]) for name in (DIR, "QUACK_CACHE_DIR")]
    for folder in folders:
        assert folder.is_dir() and folder.is_relative_to(tmp_path / "cache") and folder.name == "sm90"
    assert folders[0] != folders[1]


def test_not_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    kernel_cache.keep_kernels()
    assert both_caches_are_off()


def test_not_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    kernel_cache.keep_kernels()
    assert both_caches_are_off()


def test_not_where_files_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    kernel_cache.keep_kernels()
    assert both_caches_are_off()


def test_what_the_environment_says_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLED, "0")
    monkeypatch.setenv("QUACK_CACHE_DIR", "/elsewhere")
    kernel_cache.keep_kernels()
    assert os.environ[ENABLED] == "0" and DIR not in os.environ
    assert "QUACK_CACHE_ENABLED" not in os.environ and os.environ["QUACK_CACHE_DIR"] == "/elsewhere"


def test_not_without_a_gpu_or_with_several_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ((), ((9, 0), (10, 0))):
        monkeypatch.setattr(kernel_cache, "gpu_capabilities", lambda found=found: frozenset(found))
        kernel_cache.keep_kernels()
        assert ENABLED not in os.environ


@pytest.mark.slow
@pytest.mark.parametrize("task", [False, True])
def test_it_is_said_before_megatron_core_is_imported(task: bool, tmp_path: Path) -> None:
    """With Transformer Engine that imports FlashAttention 4, which reads it then."""
    start = "run_task('zoo.training.trainer:run_rank', recipe, 1)" if task else "launch(recipe, in_process=True)"
    (tmp_path / "flash_attn.py").write_text("")
    code = (
        "import os, sys\n"
        "from zoo.config.compose import load_recipe\n"
        "from zoo.launch import kernel_cache\n"
        "from zoo.launch.launcher import launch, run_task\n"
        "kernel_cache.gpu_capabilities = lambda: {(9, 0)}\n"
        "assert 'megatron.core' not in sys.modules\n"
        "class Watch:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'megatron.core':\n"
        f"            print(os.environ.get('{ENABLED}'))\n"
        "            raise SystemExit\n"
        "sys.meta_path.insert(0, Watch())\n"
        "recipe = load_recipe('qwen3_omni_sft', ['size=tiny', 'nproc=1', 'run.dir=run'])\n"
        f"{start}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "1\n", done.stderr
