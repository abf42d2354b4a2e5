"""
usage: zoo doctor [recipe=NAME [key=value ...]] [kernels=NAME,NAME] [--known-wrong] [--json]

Checks every kernel that training would use on this machine, at the shapes, backend and precision of a recipe (default:
all recipes): its result and its gradients against a plain reference. Prints versions and a table of relative errors.
Exits with 1 where a kernel is wrong.

  kernels=NAME,...   only these: attention, delta_rule, experts, ...
  --known-wrong      also try kernels that were found wrong, which zoo does not use; the exit code ignores them
  --json             everything, for machines
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from zoo.cli.arguments import split_flags, split_recipe
from zoo.errors import UserError

if TYPE_CHECKING:
    from zoo.config.schema import Recipe
    from zoo.doctor.measure import CheckResult

KERNELS = (
    "attention", "attention_padded", "attention_window", "delta_inputs", "delta_rule", "gated_norm", "router", "router_loads", "experts",
    "permutation", "norm", "qk_norm", "rotary", "swiglu", "output_gate", "loss", "vision_attention", "audio_attention", "vision_block",
)  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    """Print what was found; 1 where a kernel is wrong."""
    flags, rest = split_flags(arguments, ("--json", "--known-wrong"))
    kernel_keys = [text for text in rest if text.removeprefix("--").startswith("kernels=")]
    only = [name for text in kernel_keys for name in text.partition("=")[2].split(",") if name]
    for name in only:
        if name not in KERNELS:
            near = get_close_matches(name, KERNELS, n=1) or list(KERNELS)
            raise UserError(f"kernels={name}: no such kernel; nearest: {', '.join(near)}")
    recipes = _recipes([text for text in rest if text not in kernel_keys])

    from zoo.doctor.machine import machine
    from zoo.doctor.run_checks import KNOWN_WRONG
    from zoo.training.kernel_check.recipes import check_recipes

    quiet = "--json" in flags
    if not quiet:
        print(" | ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
        print(HEAD, flush=True)

    def on_result(name: str, result: CheckResult) -> None:
        if not quiet:
            print(_line(result, used=name != KNOWN_WRONG), flush=True)

    report = check_recipes(recipes, only=only, known_wrong="--known-wrong" in flags, report=on_result)
    if quiet:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        count = len(report.results)
        outcome = f"{len(report.wrong)} of {count} kernels wrong" if report.wrong else f"{count} kernels, all right"
        print(f"{outcome} in {report.seconds:.0f} s")
        for result in report.wrong:
            print(f"  {result.check.name}: {_why(result)}; fix: {result.check.fix}")
    return 0 if report.right else 1


def _recipes(arguments: list[str]) -> list[Recipe]:
    """The recipe that is named, with its overrides, or all there are."""
    from zoo.config.compose import load_recipe
    from zoo.config.files import root_recipes
    from zoo.config.validate import validate
    from zoo.launch.prepare import prepare
    from zoo.planner.plan import with_architecture

    if arguments:
        name, overrides = split_recipe(arguments, "zoo doctor recipe=NAME")
        return [with_architecture(prepare(load_recipe(name, overrides))[0])]
    plain = ["hardware=cpu", "engine.precision=null"]
    return [validate(load_recipe(name, plain), 1) for name in root_recipes()]


HEAD = f"{'kernel':<17} {'runs':<22} {'worst':>9}  {'of':<17} {'bound':>7}  {'':<5}  shape"


def _line(result: CheckResult, used: bool = True) -> str:
    check = result.check
    if result.errors:
        tensor, error = result.worst
        numbers = f"{error:9.1e}  {tensor:<17}"
    else:
        numbers = f"{'-':>9}  {'-':<17}"
    outcome = "ok" if result.right else "WRONG"
    shown = (
        f"{check.name:<17} {check.kernel:<22} {numbers} {check.bound:7.0e}  {outcome:<5}  {check.dtype} {check.shape}"
    )
    if not used:
        shown += " (not used: known to have been wrong)"
    return shown if result.problem is None else f"{shown}\n{'':<17} {result.problem.splitlines()[0]}"


def _why(result: CheckResult) -> str:
    if result.problem is not None:
        return result.problem.splitlines()[0]
    tensor, error = result.worst
    return f"{tensor} is off by {error:.1e} of its size, {result.check.bound:.0e} allowed"
