"""The check before training: once for a GPU, its driver and versions, and what decides a recipe's kernels and shapes.

What was found right is kept in `$XDG_CACHE_HOME/zoo/doctor` (~/.cache/zoo/doctor). Nothing is done without a GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zoo.config.devices import gpu_count
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.engine.planning.plan import as_planned
from zoo.errors import UserError
from zoo.files import cache_folder


def check_kernels(recipe: Recipe) -> None:
    """On the first rank of a node with a GPU, before anything is built; the others wait for it to join them.

    Raises:
        UserError: a kernel that the recipe would use is wrong on this machine; it says which, and what to change.
    """
    if not recipe.engine.doctor or not gpu_count() or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    planned = as_planned(recipe)
    if planned is None:  # not known before its weights are had; `zoo doctor` with a folder checks it
        return
    recipe = validate(planned, int(os.environ.get("WORLD_SIZE", "1")))
    from zoo.doctor.machine import machine

    kept = _record(_asked(recipe, machine()))
    if kept is not None and kept.is_file():
        return
    print(
        "zoo: checking the kernels of this recipe on this GPU, once (engine.doctor=false skips it) ...",
        flush=True,
    )
    from zoo.doctor.run_checks import visit

    unused = {"attention_padded"} if recipe.packing.mode == "thd" else {"attention"}
    found = visit([recipe], skip=unused)
    wrong = [verdict for _, verdict in found.verdicts if not verdict.right]
    if wrong:
        raise UserError("; ".join(_refusal(verdict) for verdict in wrong))
    _keep(kept, found.as_dict())
    print(f"zoo: {len(found.verdicts)} kernels are right ({found.seconds:.0f} s)", flush=True)


def with_architecture(recipe: Recipe) -> Recipe:
    """The recipe with the architecture of its weights; UserError where it can't be had."""
    planned = as_planned(recipe)
    if planned is None:
        raise UserError(
            f"model.init={recipe.model.init}: its config.json is neither here nor to be had from the hub; give a folder, "
            f"or model.init=random and size="
        )
    return planned


def _refusal(verdict: Any) -> str:
    check = verdict.check
    if verdict.problem is not None:
        why = verdict.problem.splitlines()[0]
    else:
        what, error = verdict.worst
        why = f"its {what} is off by {error:.1e} of its size, {check.bound:.0e} is allowed"
    return f"the kernel {check.name} ({check.kernel}) is wrong on this GPU: {why}; mend: {check.mend}"


def _asked(recipe: Recipe, facts: dict[str, str]) -> dict[str, Any]:
    """All that kernels, shapes and versions follow from, the code of `zoo.nn` included."""
    from zoo.nn import backend

    code = hashlib.sha256()
    for path in sorted(Path(backend.__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    return {
        "machine": facts,
        "arch": recipe.model.arch,
        "engine": asdict(replace(recipe.engine, threads=None, doctor=True)),
        "parallel": {name: getattr(recipe.parallel, name) for name in ("tp", "cp", "ep", "etp")},
        "packing": asdict(recipe.packing),
        "code": code.hexdigest(),
    }


def _record(asked: dict[str, Any]) -> Path | None:
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:24]
    cache = cache_folder("doctor")
    return None if cache is None else cache / f"{digest}.json"


def _keep(path: Path | None, found: dict[str, Any]) -> None:
    """Write under another name first; a folder that is not there, or can't be written, costs a check at the next start."""
    if path is None:
        return
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(found, indent=2), encoding="utf-8")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
