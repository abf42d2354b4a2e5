"""The checks of a recipe: each kernel where the model has it, at the recipe's shapes, with its reference.

Bounds are relative errors, |a - b| / |b|, of a whole tensor against fp64 on the same inputs. Rounding the inputs of
bf16 products alone gives 2e-3 to 4e-3; a wrong kernel gives 0.1 and more.
"""

from __future__ import annotations

from collections.abc import Iterator

from zoo.doctor.expert_checks import expert_checks
from zoo.doctor.layers import Subject
from zoo.doctor.measure import Check
from zoo.doctor.sequence_checks import attention_checks, linear_attention_checks
from zoo.doctor.token_checks import token_checks
from zoo.doctor.tower_checks import tower_checks


def checks(subject: Subject) -> Iterator[Check]:
    """Every check of a subject."""
    yield from attention_checks(subject)
    yield from linear_attention_checks(subject)
    yield from expert_checks(subject)
    yield from token_checks(subject)
    yield from tower_checks(subject)
