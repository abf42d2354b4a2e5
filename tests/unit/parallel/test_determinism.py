"""fp32 is fp32, whatever a user or a library has asked PyTorch for; afterwards it is as it was."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.engine import single_process_world

from zoo.parallel.determinism import fp32_settings, plain_fp32

OLD: tuple[Callable[[], Any], ...] = (
    torch.get_float32_matmul_precision,
    lambda: torch.backends.cuda.matmul.allow_tf32,
    lambda: torch.backends.cudnn.allow_tf32,
)


def state() -> list[Any]:
    """Every setting; "mixed" where PyTorch refuses to say."""
    found: list[Any] = [*fp32_settings()]
    for read in OLD:
        try:
            found.append(read())
        except RuntimeError:
            found.append("mixed")
    return found


def _old() -> None:
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = True


def _new() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]


def _generic() -> None:
    torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    with plain_fp32():
        yield


@pytest.mark.parametrize("ask", [_old, _new, _generic])
def test_fp32_is_plain_in_between(ask: Callable[[], None]) -> None:
    ask()
    before = state()
    for meanwhile in (plain_fp32, single_process_world):
        with meanwhile():  # type: ignore[operator]
            assert state() == ["ieee"] * len(fp32_settings()) + ["highest", False, False]
        assert state() == before


def test_a_library_that_asks_meanwhile_leaves_nothing_behind() -> None:
    before = state()
    with plain_fp32():
        torch.set_float32_matmul_precision("high")
    assert state() == before
