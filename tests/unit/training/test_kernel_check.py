"""The doctor's checks of whole recipes, and the check before training."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from zoo.cli.runs.doctor import KERNELS
from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.doctor import run_checks
from zoo.errors import UserError
from zoo.nn.decoder.attention import delta_inputs, gated_delta_net, varlen
from zoo.packing import PackedLayout
from zoo.training.kernel_check import before_training, process
from zoo.training.kernel_check.recipes import check_recipes


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    return validate(load_recipe("qwen35_vl_moe_sft", ["size=tiny-moe", "hardware=cpu", f"run.dir={tmp_path}"]), 1)


@pytest.mark.sampled(4)
def test_every_kernel_of_a_recipe_and_a_wrong_one(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_recipes([recipe])
    assert found.right
    names = {result.check.name for _, result in found.results}
    # The last is of routers in half precision.
    assert names == set(KERNELS) - {"audio_attention", "attention_window", "router"}

    def leaking(x: Tensor, weight: Tensor, layout: PackedLayout) -> Tensor:
        whole = PackedLayout.from_lengths([layout.total])
        return original(x, weight, whole)

    original = delta_inputs.causal_convolution
    monkeypatch.setattr(delta_inputs, "causal_convolution", leaking)
    monkeypatch.setattr(varlen, "sdpa", lambda q, k, v, scale, causal, mask=None: v.repeat_interleave(2, 1))
    again = check_recipes([recipe], only=("delta_inputs", "attention", "norm"))
    assert {result.check.name for result in again.wrong} == {"delta_inputs", "attention"}
    assert not again.right
    json.dumps(again.as_dict(), allow_nan=False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The check before training sees a GPU; nothing else does."""
    monkeypatch.setattr(before_training, "gpu_count", lambda: 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "zoo" / "doctor"


@pytest.mark.slow
def test_the_check_before_training_is_made_once(
    recipe: Any, gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, run_check = list[str](), run_checks.run_check
    monkeypatch.setattr(run_checks, "run_check", lambda check: (made.append(check.name), run_check(check))[1])
    before_training.check_kernels(recipe)
    (kept,) = gpu.glob("*.json")
    assert json.loads(kept.read_text())["right"] is True
    names = {kernel["kernel"] for kernel in json.loads(kept.read_text())["kernels"]}
    assert names - {*made} == {*before_training.SLOW}, "processes of their own made these"
    assert "attention" in names and "attention_padded" not in names
    assert "kernels are right" in capsys.readouterr().out
    before_training.check_kernels(recipe)
    assert capsys.readouterr().out == "", "nothing is done twice"
    other = recipe.replace({"engine.recompute": "full", "packing.budget": 512})
    before_training.check_kernels(other)
    assert len(list(gpu.glob("*.json"))) == 2, "other shapes are checked by themselves"
    monkeypatch.setenv("FLA_FLASH_QLA", "0")  # as it is without the variable
    before_training.check_kernels(other)
    assert len(list(gpu.glob("*.json"))) == 2
    for count, name in enumerate(("FLA_FLASH_QLA", "NVTE_FUSED_ATTN"), 3):
        monkeypatch.setenv(name, "1")
        before_training.check_kernels(other)
        assert len(list(gpu.glob("*.json"))) == count, "kernels that a variable chooses are checked by themselves"


@pytest.mark.sampled(2)
def test_a_wrong_kernel_stops_the_run_and_says_what_to_change(
    recipe: Any, gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(before_training, "SLOW", ())  # all in this process, where the kernel is wrong
    monkeypatch.setattr(
        gated_delta_net, "chunked_delta_rule", lambda q, k, v, decay, beta, lengths: (v * beta[..., None], None)
    )
    with pytest.raises(UserError, match=r"the kernel delta_rule \(torch\) is wrong on this GPU: .*; fix: "):
        before_training.check_kernels(recipe)
    assert not list(gpu.glob("*.json"))
    before_training.check_kernels(recipe.replace({"engine.doctor": False}))


def test_a_kernel_that_ends_its_process_stops_the_run(recipe: Any, gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os; print('an illegal address', flush=True); os.abort()"
    monkeypatch.setattr(process, "module_command", lambda *_: [sys.executable, "-c", program])
    told = r"the kernel attention \(torch sdpa\) is wrong on this GPU: the process that checks it ended with SIGABRT"
    with pytest.raises(UserError, match=told + r" \(an illegal address\); fix: .*; the kernel delta_rule"):
        before_training.check_kernels(recipe)
    assert not list(gpu.glob("*.json"))


def test_a_check_that_no_other_process_can_make_is_made_here(
    recipe: Any, gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = [sys.executable, "-c", "exit('the GPU takes one process')"]
    monkeypatch.setattr(process, "module_command", lambda *_: program)
    before_training.check_kernels(recipe)
    (kept,) = gpu.glob("*.json")
    names = [kernel["kernel"] for kernel in json.loads(kept.read_text())["kernels"]]
    assert names[-3:] == ["attention", "delta_rule", "experts"]


def test_without_a_gpu_or_a_home_nothing_is_kept(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(before_training, "gpu_count", lambda: 0)
    before_training.check_kernels(recipe)
    assert not (tmp_path / "cache").exists()
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.chdir(tmp_path)
    assert before_training._record({}) is None
    before_training._remember(None, {})
    assert not list(tmp_path.iterdir())
