"""All checks of some recipes on this machine, each kernel and shape once.

Bounds are relative errors, |a - b| / |b|, of a whole tensor against fp64 on the same inputs. Rounding the inputs of
bf16 products alone gives 2e-3 to 4e-3; a wrong kernel gives 0.1 and more.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import torch

from zoo.doctor.expert_checks import expert_checks
from zoo.doctor.known_wrong import unrefused
from zoo.doctor.layers import Subject
from zoo.doctor.machine import machine
from zoo.doctor.measure import Check, CheckResult, run_check
from zoo.doctor.sequence_checks import attention_checks, linear_attention_checks
from zoo.doctor.token_checks import token_checks
from zoo.doctor.tower_checks import tower_checks
from zoo.types import JsonObject

OnResult = Callable[[str, CheckResult], None]  # gets each result at once, with the name of its recipe
Elsewhere = Callable[[Check], Callable[[], CheckResult | None] | None]
KNOWN_WRONG = "known wrong"  # the name under which a kernel that zoo does not use is reported


@dataclass(frozen=True)
class Findings:
    """The results of all checks."""

    machine: dict[str, str]
    results: tuple[tuple[str, CheckResult], ...]  # with the first recipe that needs the kernel
    known_wrong: tuple[CheckResult, ...]  # of kernels that zoo doesn't use
    seconds: float

    @property
    def right(self) -> bool:
        """Whether every kernel that would be used is right."""
        return not self.wrong

    @property
    def wrong(self) -> list[CheckResult]:
        """The kernels that would be used and are wrong."""
        return [result for _, result in self.results if not result.right]

    def as_dict(self) -> JsonObject:
        """Plain values, for `--json`."""
        return {
            "machine": self.machine,
            "right": self.right,
            "kernels": [{"recipe": name} | result.as_dict() for name, result in self.results],
            "known_wrong": [result.as_dict() for result in self.known_wrong],
            "seconds": round(self.seconds, 1),
        }


def run_checks(
    subjects: Iterable[tuple[str, Callable[[], Subject]]],
    *,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    known_wrong: Iterable[Check] = (),
    report: OnResult = lambda name, result: None,
    elsewhere: Elsewhere = lambda check: None,
) -> Findings:
    """Check the kernels of some recipes.

    Args:
        subjects: a recipe's name, and what builds its subject; one is in memory at a time.
        only: names of the checks to make; empty: all.
        skip: names of checks to leave out.
        known_wrong: checks of kernels that zoo does not use.
        report: gets each result as soon as it is there.
        elsewhere: is given each check. It may begin it in another process and return a function that waits for the result;
            that function returns None where the process could not make the check, which is then made here. It returns None for
            checks to be made here.
    """
    start, seen = time.perf_counter(), set[str]()
    results, suspected = list[tuple[str, CheckResult]](), list[CheckResult]()
    for name, build in subjects:
        for result in _results(build(), seen, only, skip, elsewhere):
            results.append((name, result))
            report(name, result)
        free_memory()
    for check in known_wrong:
        with unrefused():
            suspected.append(run_check(check))
        report(KNOWN_WRONG, suspected[-1])
    free_memory()
    return Findings(machine(), tuple(results), tuple(suspected), time.perf_counter() - start)


def _results(
    subject: Subject, seen: set[str], only: Collection[str], skip: Collection[str], elsewhere: Elsewhere
) -> Iterable[CheckResult]:
    """Results of the checks that have not been `seen`, which it adds to; last those that other processes make."""
    in_process, others = list[Check](), list[tuple[Check, Callable[[], CheckResult | None]]]()
    for check in checks(subject):
        if check.key in seen or check.name in skip or (only and check.name not in only):
            continue
        seen.add(check.key)
        result = elsewhere(check)
        if result is None:
            in_process.append(check)
        else:
            others.append((check, result))
    for check in in_process:
        yield run_check(check)
    for check, result in others:
        yield result() or run_check(check)


def free_memory() -> None:
    """Leave nothing on the GPU, and no trace in its peak statistics."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def checks(subject: Subject) -> Iterator[Check]:
    """Every check of a subject."""
    yield from attention_checks(subject)
    yield from linear_attention_checks(subject)
    yield from expert_checks(subject)
    yield from token_checks(subject)
    yield from tower_checks(subject)
