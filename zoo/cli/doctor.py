"""
usage: zoo doctor [recipe=NAME [key=value ...]] [kernels=NAME,NAME] [--known-wrong] [--json]

Checks every kernel that training would use on this machine, at the shapes, backend and precision of a recipe (default:
all recipes): its result and its gradients against a plain reference. Prints versions and a table of relative errors.
Exits with 1 where a kernel is wrong.

  kernels=NAME,...   only these: attention, delta_rule, experts, ...
  --known-wrong      also try kernels that have been seen to be wrong, which zoo does not use; the exit code is not theirs
  --json             everything, for machines
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from zoo.cli.arguments import split_flags, split_recipe
from zoo.errors import UserError

if TYPE_CHECKING:
    from zoo.config.schema import Recipe
    from zoo.doctor.measure import Verdict

KERNELS = (
    "attention", "attention_padded", "convolution", "delta_rule", "gated_norm", "experts", "norm", "qk_norm", "rotary",
    "swiglu", "output_gate", "loss", "vision_attention", "audio_attention", "vision_block",
)  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    """Print what was found; 1 where a kernel is wrong."""
    flags, rest = split_flags(arguments, ("--json", "--known-wrong"))
    own = [text for text in rest if text.removeprefix("--").startswith("kernels=")]
    only = [name for text in own for name in text.partition("=")[2].split(",") if name]
    for name in only:
        if name not in KERNELS:
            near = get_close_matches(name, KERNELS, n=1) or list(KERNELS)
            raise UserError(f"kernels={name}: no such kernel; nearest: {', '.join(near)}")
    recipes = _recipes([text for text in rest if text not in own])

    from zoo.doctor.machine import machine
    from zoo.doctor.run_checks import visit

    quiet = "--json" in flags
    if not quiet:
        print(_versions(machine()), flush=True)
        print(HEAD, flush=True)

    def told(name: str, verdict: Verdict) -> None:
        if not quiet:
            print(_line(verdict, used=name != "known wrong"), flush=True)

    found = visit(recipes, only=only, known_wrong="--known-wrong" in flags, told=told)
    if quiet:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        wrong = [verdict for _, verdict in found.verdicts if not verdict.right]
        count = len(found.verdicts)
        said = f"{len(wrong)} of {count} kernels wrong" if wrong else f"{count} kernels, all right"
        print(f"{said} in {found.seconds:.0f} s")
        for verdict in wrong:
            print(f"  {verdict.check.name}: {_why(verdict)}; mend: {verdict.check.mend}")
    return 0 if found.right else 1


def _recipes(arguments: list[str]) -> list[Recipe]:
    """The recipe that is named, with its overrides, or all there are."""
    from zoo.config.compose import load_recipe
    from zoo.config.files import recipe_names
    from zoo.config.validate import validate
    from zoo.doctor.startup import with_architecture
    from zoo.engine.launch.launcher import prepare

    if arguments:
        name, overrides = split_recipe(arguments, "zoo doctor recipe=NAME")
        return [with_architecture(prepare(load_recipe(name, overrides))[0])]
    plain = ["hardware=cpu", "engine.precision=null"]
    return [validate(load_recipe(name, plain), 1) for name in recipe_names() if "lora" not in name]


HEAD = f"{'kernel':<17} {'runs':<22} {'worst':>9}  {'of':<17} {'bound':>7}  {'':<5}  shape"


def _line(verdict: Verdict, used: bool = True) -> str:
    check = verdict.check
    if verdict.errors:
        what, error = verdict.worst
        figures = f"{error:9.1e}  {what:<17}"
    else:
        figures = f"{'-':>9}  {'-':<17}"
    said = "ok" if verdict.right else "WRONG"
    shown = f"{check.name:<17} {check.kernel:<22} {figures} {check.bound:7.0e}  {said:<5}  {check.dtype} {check.shape}"
    if not used:
        shown += " (not used: known to have been wrong)"
    return shown if verdict.problem is None else f"{shown}\n{'':<17} {verdict.problem.splitlines()[0]}"


def _why(verdict: Verdict) -> str:
    if verdict.problem is not None:
        return verdict.problem.splitlines()[0]
    what, error = verdict.worst
    return f"{what} is off by {error:.1e} of its size, {verdict.check.bound:.0e} allowed"


def _versions(facts: dict[str, Any]) -> str:
    return " | ".join(f"{name} {value}" for name, value in facts.items())
