"""A visit: all checks of some recipes on this machine, each kernel and shape once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zoo.config.schema import Recipe
from zoo.doctor.checks import checks
from zoo.doctor.known_wrong import suspects, unrefused
from zoo.doctor.layers import subject
from zoo.doctor.machine import machine
from zoo.doctor.measure import Verdict, examine
from zoo.engine.distributed.world import alone


@dataclass(frozen=True)
class Findings:
    """What a visit found; `suspected` are kernels that zoo doesn't use, tried because they have been wrong."""

    machine: dict[str, str]
    verdicts: tuple[tuple[str, Verdict], ...]  # with the first recipe that asked for it
    suspected: tuple[Verdict, ...]
    seconds: float

    @property
    def right(self) -> bool:
        """Whether every kernel that would be used is right."""
        return all(verdict.right for _, verdict in self.verdicts)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return {
            "machine": self.machine,
            "right": self.right,
            "kernels": [{"recipe": name} | verdict.as_dict() for name, verdict in self.verdicts],
            "known_wrong": [verdict.as_dict() for verdict in self.suspected],
            "seconds": round(self.seconds, 1),
        }


def visit(
    recipes: Sequence[Recipe],
    *,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    known_wrong: bool = False,
    told: Callable[[str, Verdict], None] = lambda name, verdict: None,
) -> Findings:
    """Check the kernels of validated recipes, or those that `only` names, without those of `skip`; `told` gets each verdict at once."""
    start, verdicts, suspected = time.perf_counter(), [], []
    seen: set[str] = set()
    with alone(recipes[0]) as here:
        for recipe in recipes:
            name = f"{recipe.recipe} {recipe.size or ''}".strip()
            for check in checks(subject(recipe, here)):
                if check.key in seen or check.name in skip or (only and check.name not in only):
                    continue
                seen.add(check.key)
                verdicts.append((name, examine(check)))
                told(*verdicts[-1])
            _give_back_memory()
        if known_wrong:
            for check in suspects(here):
                with unrefused():
                    suspected.append(examine(check))
                told("known wrong", suspected[-1])
        facts = machine()
    _give_back_memory()
    return Findings(facts, tuple(verdicts), tuple(suspected), time.perf_counter() - start)


def _give_back_memory() -> None:
    """Leave nothing on the GPU, and no trace in its peak figures."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
