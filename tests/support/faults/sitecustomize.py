"""Makes one rank of a real run misbehave: `FAULT="RANK STEP KIND"`, with this folder on PYTHONPATH.

Python imports a module of this name before anything else, so that it reaches processes that others start.
Kinds: hang (the thread that prepares data sleeps for good), raise, kill (SIGKILL), freeze (SIGSTOP), each when the rank
prepares the data of that step; slow-data, slow-tower, slow-network, slow-save: a second more there.
"""

import importlib
import importlib.abc
import os
import signal
import sys
import time


def misbehave(kind: str) -> None:
    if kind == "hang":
        time.sleep(10_000)
    elif kind == "raise":
        raise ArithmeticError("a fault that a test has put here")
    elif kind in ("kill", "freeze"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    else:
        time.sleep(1.0)


def before(owner: object, name: str, due) -> None:
    """Misbehave before a function, where it is due."""
    original = getattr(owner, name)

    def faulty(*args, **kwargs):
        if due():
            misbehave(KIND)
        return original(*args, **kwargs)

    setattr(owner, name, faulty)


def patch_loader(module) -> None:
    produced = [0]

    def due() -> bool:
        produced[0] += 1
        return produced[0] == STEP and RANK in (os.environ.get("RANK", "0"), "all")

    before(module.BatchLoader, "_produce", due)


def patch_loop(module) -> None:
    run = module.Run
    here = lambda: RANK in (os.environ.get("RANK", "0"), "all")  # noqa: E731
    now = {"step": 0}
    before(run, "_train_step", lambda: now.update(step=now["step"] + 1) or False)
    if KIND == "slow-save":
        before(module.checkpoint, "save", here)
    elif KIND == "slow-tower":
        from zoo.models.qwen3_omni.model import AudioTower

        before(AudioTower, "forward", lambda: here() and now["step"] == STEP)
    elif KIND == "slow-network":
        import torch.distributed

        built = run._build

        def build(self):
            built(self)
            config = self.trainable.chunks[0].config
            before(torch.distributed, "all_reduce", lambda: False)
            inner = config.finalize_model_grads_func.__closure__
            cell = next(
                c
                for c in inner
                if callable(c.cell_contents) and c.cell_contents.__name__ == "finalize_model_grads"
            )
            original = cell.cell_contents

            def slow(*args, **kwargs):
                if here() and now["step"] == STEP:
                    misbehave(KIND)
                return original(*args, **kwargs)

            cell.cell_contents = slow

        run._build = build


class Finder(importlib.abc.MetaPathFinder):
    """Patches a module when it is imported."""

    def find_spec(self, name, path, target=None):
        if name != PATCHED[0]:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            PATCHED[1](module)

        spec.loader.exec_module = exec_module
        return spec


if "FAULT" in os.environ:
    import importlib.util

    RANK, step, KIND = os.environ["FAULT"].split()
    STEP = int(step)
    if KIND.startswith("slow") and KIND != "slow-data":
        PATCHED = ("zoo.engine.loop", patch_loop)
    else:
        PATCHED = ("zoo.data.loader", patch_loader)
    sys.meta_path.insert(0, Finder())
