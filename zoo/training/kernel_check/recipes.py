"""The doctor's checks of the kernels that recipes would use.

`zoo.doctor` knows kernels and their references; here it is given a world of one rank and the recipe's model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from zoo.config.schema import Recipe
from zoo.parallel.world import World, alone, on_one_rank

if TYPE_CHECKING:
    from zoo.doctor.layers import Subject
    from zoo.doctor.run_checks import Elsewhere, Findings, OnResult


def check_recipes(
    recipes: Sequence[Recipe],
    *,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    known_wrong: bool = False,
    report: OnResult = lambda name, result: None,
    elsewhere: Elsewhere = lambda check: None,
) -> Findings:
    """Check the kernels of validated recipes on this machine, each kernel and shape once.

    Args:
        only: names of the checks to make; empty: all.
        skip: names of checks to leave out.
        known_wrong: also try kernels that zoo does not use because they were found wrong.
        report: gets each result as soon as it is there, with the name of its recipe.
        elsewhere: see `zoo.doctor.run_checks.run_checks`.
    """
    from zoo.doctor.known_wrong import known_wrong_checks
    from zoo.doctor.run_checks import free_memory, run_checks

    with alone(recipes[0]) as world:
        findings = run_checks(
            [(f"{recipe.recipe} {recipe.size or ''}".strip(), partial(_subject, recipe, world)) for recipe in recipes],
            only=only,
            skip=skip,
            known_wrong=known_wrong_checks(world.device, world.groups) if known_wrong else (),
            report=report,
            elsewhere=elsewhere,
        )
    free_memory()
    return findings


def _subject(recipe: Recipe, world: World) -> Subject:
    """The layers to check, in a world of one rank."""
    from zoo.doctor.layers import make_subject
    from zoo.model import build
    from zoo.model.meta_model import on_meta

    # The shapes are the same under either backend, and Transformer Engine's modules want a GPU.
    plain = on_one_rank(recipe).replace({"engine.backend": "torch", "train.loss": "nll"})
    with on_meta(world) as nowhere:
        (whole,) = build.build_model(build.assembly_of_arch(recipe), plain, nowhere)
    return make_subject(recipe, whole, world.device)
