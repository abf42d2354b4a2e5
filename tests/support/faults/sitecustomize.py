"""Makes ranks of a real run misbehave: `FAULT="RANK STEP KIND,KIND..."` (RANK may be "all"), with this folder on PYTHONPATH.

Python imports a module of this name before anything else, so that it reaches processes that others start. FAULTS says where
each kind strikes: a function of zoo's or megatron-core's, which is patched as its module is imported. A function that is
no more ends the process: a fault that does not strike would make a test pass for nothing. With FAULT_LOG, a file, each kind
is noted there when it strikes first.
"""

import importlib
import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """What happens before a function is called, and when."""

    target: str  # module:function or module:Class.method
    act: Callable[[], None]
    calls: int | None = None  # it strikes at the first so many calls; None: at the call of the step that FAULT names


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise ArithmeticError("a fault that a test has put here")


def sleep(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(float(os.environ.get("FAULT_SECONDS", seconds)))


PRODUCE = "zoo.data.loading.loader:BatchLoader._produce"  # called once a step, from the thread that prepares data
WRITER = "zoo.checkpoint.storage.disk:write"  # called once a save
FAULTS = {
    "hang": Fault(PRODUCE, lambda: time.sleep(10_000)),
    "raise": Fault(PRODUCE, fail),
    "kill": Fault(PRODUCE, kill),
    "freeze": Fault(PRODUCE, freeze),
    "slow-data": Fault(PRODUCE, sleep(1.0)),
    "slow-tower": Fault("zoo.models.qwen3_omni.model:AudioTower.forward", sleep(1.0)),
    "slow-network": Fault("megatron.core.distributed.finalize_model_grads:finalize_model_grads", sleep(1.0)),
    "slow-rows": Fault("zoo.data.loading.sample_source:SampleSource._read", sleep(0.5), calls=12),
    "slow-eval": Fault("zoo.data.loading.evaluation:encode_all", sleep(2.0), calls=4),
    "slow-save": Fault("zoo.checkpoint.storage.disk:digest", sleep(1.0), calls=20),
    "slow-export": Fault("zoo.bridge.files.writer:ShardWriter.write", sleep(0.2), calls=40),
    "slow-copy": Fault("zoo.checkpoint.staging.copying:_write", sleep(1.0), calls=100),
    "hang-save": Fault(WRITER, lambda: time.sleep(10_000), calls=1),
}  # fmt: skip


def arm(kind: str, step: int = 1, rank: str = "all", module: Any = None) -> Callable[[], None]:
    """Patch the function where a fault strikes; what takes the patch back. AttributeError where there is no such function."""
    fault = FAULTS[kind]
    name, _, path = fault.target.partition(":")
    *owners, function = path.split(".")
    owner = module or importlib.import_module(name)
    for part in owners:
        owner = getattr(owner, part)
    original, plain = owner.__dict__.get(function), getattr(owner, function)
    if original is None:
        raise AttributeError(f"{fault.target}: the fault {kind} has nothing to strike at")
    count = [0]

    def faulty(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        due = count[0] == step if fault.calls is None else count[0] <= fault.calls
        if due and rank in (os.environ.get("RANK", "0"), "all"):
            note(kind)
            fault.act()
        return plain(*args, **kwargs)

    setattr(owner, function, staticmethod(faulty) if isinstance(original, staticmethod) else faulty)
    return lambda: setattr(owner, function, original)


def note(kind: str) -> None:
    if "FAULT_LOG" in os.environ:
        with open(os.environ["FAULT_LOG"], "a") as file:
            file.write(f"{kind}\n")


class Finder(importlib.abc.MetaPathFinder):
    """Arms faults as the modules where they strike are imported."""

    def __init__(self, rank: str, step: int, kinds: list[str]) -> None:
        self.rank, self.step = rank, step
        self.kinds: dict[str, list[str]] = {}
        for kind in kinds:
            self.kinds.setdefault(FAULTS[kind].target.partition(":")[0], []).append(kind)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        kinds = self.kinds.pop(name, None)
        if kinds is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None, name
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for kind in kinds:
                arm(kind, self.step, self.rank, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "FAULT" in os.environ:
    RANK, STEP, KINDS = os.environ["FAULT"].split()
    sys.meta_path.insert(0, Finder(RANK, int(STEP), KINDS.split(",")))
