"""One check: a kernel and its reference on the same inputs, and the relative errors of result and gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from zoo.types import JsonObject


@dataclass(frozen=True)
class Trial:
    """A kernel about to be tried.

    Both functions take `inputs` by name and return one tensor. The reference also gets copies of `parameters`, those of
    the kernel's module, by name.
    """

    kernel: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    real: Tensor | None = None  # bool: rows of the result that count; (T,), or its leading axes
    exact: torch.dtype = torch.float64  # what the reference computes in


@dataclass(frozen=True)
class Check:
    """One kernel at one shape, and the largest error it may have."""

    name: str  # as `kernels=` and the table name it
    kernel: str  # the implementation that runs here
    shape: str
    dtype: str
    bound: float  # largest relative error of the result and of each gradient
    fix: str  # what to change in a recipe where it is wrong
    prepare: Callable[[], Trial] | None  # None in a result, which keeps no tensors

    @property
    def key(self) -> str:
        """Identity of the check: two recipes that need the same check have the same key."""
        return f"{self.name} | {self.kernel} | {self.shape} | {self.dtype}"


@dataclass(frozen=True)
class CheckResult:
    """The result of a check: relative errors by name ("out", "d query", ...), or why there are none."""

    check: Check
    errors: Mapping[str, float]
    problem: str | None
    seconds: float

    @property
    def worst(self) -> tuple[str, float]:
        """The name of the largest error, and the error."""
        return max(self.errors.items(), key=lambda pair: pair[1])

    @property
    def right(self) -> bool:
        """Whether it ran and every error is within the bound."""
        return self.problem is None and self.worst[1] <= self.check.bound

    def as_dict(self) -> JsonObject:
        """Plain values, for `--json` and the cache."""
        check = self.check
        errors = {name: e if math.isfinite(e) else None for name, e in self.errors.items()}  # None: not finite
        return {
            "kernel": check.name, "runs": check.kernel, "shape": check.shape, "dtype": check.dtype, "bound": check.bound,
            "errors": errors, "right": self.right, "problem": self.problem,
            "fix": None if self.right else check.fix, "seconds": round(self.seconds, 3),
        }  # fmt: skip


def run_check(check: Check) -> CheckResult:
    """Run a check. An error that the kernel raises is its result: it would stop a training run as well."""
    start = time.perf_counter()
    try:
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            torch.manual_seed(0)
            assert check.prepare is not None
            errors = compare(check.prepare())
        problem = None
    except Exception as error:
        errors, problem = {}, f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    return CheckResult(replace(check, prepare=None), errors, problem, time.perf_counter() - start)


def compare(trial: Trial) -> dict[str, float]:
    """Relative errors of the result on its real rows, and of the gradient of every input and parameter."""
    originals = {name: _leaf(x, x.dtype) for name, x in trial.inputs.items()}
    out = trial.kernel(**originals)
    upstream = torch.randn_like(out)
    if trial.real is not None:
        upstream = upstream * trial.real.reshape(*trial.real.shape, *[1] * (out.ndim - trial.real.ndim))
    leaves = {name: x for name, x in originals.items() if x.requires_grad} | dict(trial.parameters)
    measured = torch.autograd.grad(out, list(leaves.values()), upstream)

    exact = {name: _leaf(x, trial.exact) for name, x in {**trial.inputs, **trial.parameters}.items()}
    wanted = trial.reference(**exact)
    gradients = torch.autograd.grad(wanted, [exact[name] for name in leaves], upstream.to(trial.exact))
    errors = {"out": _error(out.detach(), wanted.detach(), trial.real)}
    for name, got, right in zip(leaves, measured, gradients, strict=True):
        errors[f"d {name}"] = _error(got, right)
    return errors


def _leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy to take gradients of; integers as they are."""
    return x.detach().to(dtype, copy=True).requires_grad_() if x.is_floating_point() else x


def _error(got: Tensor, wanted: Tensor, real: Tensor | None = None) -> float:
    """|got - wanted| / |wanted|; infinite where anything is not finite, padding included."""
    if not bool(got.isfinite().all()):
        return float("inf")
    difference = got.to(wanted.dtype) - wanted
    if real is not None:
        real = real.reshape(*real.shape, *[1] * (got.ndim - real.ndim))
        difference, wanted = difference * real, wanted * real
    return float(difference.norm() / wanted.norm().clamp_min(1e-30))
