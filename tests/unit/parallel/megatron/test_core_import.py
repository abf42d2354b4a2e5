"""megatron-core and transformers are imported without what a run does not need, and what was left out comes when it is called."""

import gc
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo.config.checks import engine
from zoo.config.schema import Recipe
from zoo.parallel.megatron.core_import import _at_first_call, importing

STARTS = {  # what a process of zoo's does before it imports megatron-core
    "a run": "from zoo.launch.prepare import prepare; prepare(recipe)",
    "a rank": "from zoo.launch import rank_main; save_recipe(recipe, 'c.yaml'); rank_main.main(['c.yaml', 'builtins:id', 'r'])",
    "planning": "from zoo.planner import plan_process; save_recipe(recipe, 'c.yaml'); plan_process._main('c.yaml', '1', 'r')",
}


def run(code: str, **environment: str) -> str:
    """What a program prints that begins with imports of sys and of zoo's recipes."""
    begin = "import sys\nfrom zoo.config.compose import load_recipe, save_recipe\n"
    command, options = [sys.executable, "-c", begin + code], {"capture_output": True, "text": True, "timeout": 240}
    done: Any = subprocess.run(command, env=os.environ | environment, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_function_is_compiled_at_its_first_call_with_its_options() -> None:
    seen: list[Any] = []

    def compile_now(function, **options):
        seen.append((function.__name__, options))
        return function

    later = _at_first_call(compile_now)

    @later
    def plain(x: int) -> int:
        """Adds one."""
        return x + 1

    @later(dynamic=True)
    def with_options(x: int) -> int:
        return x * 2

    assert not seen and plain.__doc__ == "Adds one."
    assert (plain(1), plain(2), with_options(3)) == (2, 3, 6)
    assert seen == [("plain", {}), ("with_options", {"dynamic": True})]


@pytest.mark.slow
def test_a_rank_starts_without_the_compiler() -> None:
    code = (
        "import torch; before = torch.compile\n"
        "from zoo.parallel.determinism import set_deterministic\n"
        "from zoo.parallel.megatron.core_import import import_core\n"
        "import_core(); import zoo.training.trainer; set_deterministic(True)\n"
        "assert torch.are_deterministic_algorithms_enabled() and torch.compile is before\n"
        "sys.exit('torch._inductor.compile_fx' in sys.modules)"
    )
    run(code)


@pytest.mark.slow
def test_a_run_that_plans_imports_nothing_that_it_does_not_call(tmp_path: Path) -> None:
    for package in ("sklearn", "scipy"):
        pytest.importorskip(package)
    given = ["recipe=qwen35_vl_sft", "size=tiny", "hardware=cpu", "nproc=1", "parallel.plan=[tp,recompute]"]
    given += ["train.steps=1", "data.eval=none", "export=false", f"run.dir={tmp_path / 'run'}"]
    never = ("torch._inductor.compile_fx", "sklearn", "scipy.optimize", "datasets", "peft", "IPython", "pandas")
    out = run(
        f"from zoo.cli.main import main\nmain(['train', *{given!r}])\nprint([name for name in {never!r} if name in sys.modules])"
    )
    assert out.splitlines()[-1] == "[]"


@pytest.fixture
def transformer_engine(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds a package of that name, which ends whatever imports it."""
    package = tmp_path / "site" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import os; os._exit(77)\n")
    return {"PYTHONPATH": os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize("start", STARTS)
def test_transformer_engine_is_not_imported_under_the_torch_backend(
    start: str, transformer_engine: dict[str, str], tmp_path: Path
) -> None:
    changes = ["hardware=cpu", "size=tiny", "parallel.plan=[tp]", f"run.dir={tmp_path / 'run'}"]
    out = run(
        f"import os; os.chdir({str(tmp_path)!r})\n"
        f"recipe = load_recipe('qwen3_vl_sft', overrides={changes!r})\n{STARTS[start]}\n"
        "import megatron.core\n"
        "from megatron.core.extensions.transformer_engine import HAVE_TE\n"
        "from importlib.util import find_spec\n"
        "print(HAVE_TE, find_spec('transformer_engine'))",
        **transformer_engine,
    )
    assert out.splitlines()[-1] == "False None"


def test_transformer_engine_is_left_where_it_may_be_the_backend(transformer_engine: dict[str, str]) -> None:
    leave_out = "from zoo.parallel.megatron.core_import import leave_out_transformer_engine as leave_out\n"
    code = (
        leave_out + "from importlib.util import find_spec\n"
        "leave_out(load_recipe('qwen3_vl_sft', overrides=['engine.backend=te']))\n"
        "import types; sys.modules['megatron.core'] = types.ModuleType('megatron.core'); leave_out()\n"
        "print(find_spec('transformer_engine') is not None)"
    )
    assert run(code, **transformer_engine) == "True\n"


def test_imports_are_not_interrupted_by_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    with importing(own=True):
        with importing():
            assert not gc.isenabled()
        assert not gc.isenabled() and not frozen
    assert gc.isenabled() and frozen == [False]
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("precision", [None, "bf16", "fp32"])
@pytest.mark.parametrize("fp8", [None, "blockwise", "tensorwise"])
@pytest.mark.parametrize("backend", ["auto", "te", "torch"])
def test_the_backend_is_told_before_anything_is_imported(
    backend: str, fp8: str | None, precision: str | None, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from zoo.nn import backend as of_models

    monkeypatch.setattr(engine, "gpu_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(of_models, "_linear_widths", lambda config: [64])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    changes = {"engine.backend": backend, "engine.precision": precision, "engine.fp8": fp8 is not None}
    recipe = Recipe().replace(changes | ({"engine.fp8_recipe": fp8} if fp8 else {}))
    derived = precision or ("bf16" if gpus else "fp32")
    if derived == "fp32" and (fp8 or backend == "te"):
        return  # refused
    if (backend, fp8) in {("te", "blockwise"), ("torch", "tensorwise")}:
        return  # refused
    config: Any = SimpleNamespace(
        fp8="hybrid" if fp8 == "tensorwise" else None,
        fp8_blocks=fp8 == "blockwise",
        params_dtype=torch.bfloat16 if derived == "bf16" else torch.float32,
    )
    chosen = of_models.get_backend(backend, config)
    assert isinstance(chosen, of_models.TEBackend) == engine.uses_transformer_engine(recipe)


@pytest.mark.parametrize(
    ("package", "code"),
    [
        ("sklearn", "transformers.generation.candidate_generator.roc_curve([0, 1], [0.2, 0.7])[1].tolist()[-1]"),
        ("scipy", "transformers.loss.loss_for_object_detection.linear_sum_assignment([[1, 0], [0, 1]])[1].tolist()[0]"),
    ],
)
def test_what_transformers_calls_later_is_imported_then(package: str, code: str) -> None:
    pytest.importorskip(package)
    module, _, function = code.partition("(")[0].rpartition(".")
    if not hasattr(importlib.import_module(module), function):
        pytest.skip(f"{module} imports {package} where it calls it (transformers >= 5.21)")
    out = run(
        "from zoo.parallel.megatron.core_import import import_core\n"
        "import_core(); import transformers\n"
        f"print('{package}' in sys.modules, float({code}), '{package}' in sys.modules)"
    )
    assert out.split() == ["False", "1.0", "True"]
