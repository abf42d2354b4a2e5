"""The check of a recipe's kernels before training.

It is made once for a GPU, its driver and versions, and for all that decides a recipe's kernels and shapes. A result without
an error is kept in `$XDG_CACHE_HOME/zoo/doctor` (~/.cache/zoo/doctor). Without a GPU nothing is done.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.config.devices import gpu_count
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.errors import UserError
from zoo.files import cache_folder
from zoo.planner.plan import as_planned
from zoo.training.kernel_check.process import CheckProcesses
from zoo.training.kernel_check.recipes import check_recipes

if TYPE_CHECKING:
    from zoo.doctor.measure import CheckResult

SLOW = ("attention", "delta_rule", "experts")  # the first two take 13 of 24 s of a first check (Qwen3.5-VL 2B, H200)


def check_kernels(recipe: Recipe) -> None:
    """The check before training, on the first rank of a node with a GPU; the others wait until it joins them.

    Raises:
        UserError: a kernel that the recipe would use is wrong on this machine; the message names it and what to change.
    """
    if not recipe.engine.doctor or not gpu_count() or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    planned = as_planned(recipe)
    if planned is None:  # the architecture comes with the weights; `zoo doctor` with a folder checks it
        return
    recipe = validate(planned, int(os.environ.get("WORLD_SIZE", "1")))
    from zoo.doctor.machine import machine

    record = _record(_key(recipe, machine()))
    if record is not None and record.is_file():
        return
    print("zoo: checking the kernels of this recipe on this GPU, once (engine.doctor=false skips it) ...", flush=True)
    unused = {"attention_padded"} if recipe.packing.mode == "thd" else {"attention"}
    with CheckProcesses(recipe) as processes:
        findings = check_recipes(
            [recipe], skip=unused, elsewhere=lambda check: processes.start(check) if check.name in SLOW else None
        )
    if findings.wrong:
        raise UserError("; ".join(_refusal(result) for result in findings.wrong))
    _remember(record, findings.as_dict())
    print(f"zoo: {len(findings.results)} kernels are right ({findings.seconds:.0f} s)", flush=True)


def _refusal(result: CheckResult) -> str:
    check = result.check
    if result.problem is not None:
        why = result.problem.splitlines()[0]
    else:
        tensor_name, error = result.worst
        why = f"its {tensor_name} is off by {error:.1e} of its size, {check.bound:.0e} is allowed"
    return f"the kernel {check.name} ({check.kernel}) is wrong on this GPU: {why}; fix: {check.fix}"


def _key(recipe: Recipe, machine: dict[str, str]) -> dict[str, Any]:
    """All that decides kernels, shapes and versions, the code of `zoo.nn` and the libraries' variables included."""
    from zoo.nn import backend
    from zoo.nn.decoder.attention.delta_rule_settings import SWITCHES

    code = hashlib.sha256()
    for path in sorted(Path(backend.__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    chosen = {name: value for name, value in os.environ.items() if name.startswith(("FLA_", "NVTE_"))}
    return {
        "machine": machine,
        "arch": recipe.model.arch,
        "engine": asdict(replace(recipe.engine, threads=None, doctor=True)),
        "parallel": {name: getattr(recipe.parallel, name) for name in ("tp", "cp", "ep", "etp")},
        "packing": asdict(recipe.packing),
        "code": code.hexdigest(),
        "variables": {name: value for name, value in chosen.items() if value != SWITCHES.get(name)},
    }


def _record(key: dict[str, Any]) -> Path | None:
    """The file that holds the result for a key; None where there is no folder for caches."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:24]
    cache = cache_folder("doctor")
    return None if cache is None else cache / f"{digest}.json"


def _remember(path: Path | None, findings: dict[str, Any]) -> None:
    """Write a result, under another name first; where the folder can't be written, the next start checks again."""
    if path is None:
        return
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(findings, indent=2), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
