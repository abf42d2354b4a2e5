"""Importing megatron-core and transformers without packages that a run may never use.

- megatron-core decorates some thirty functions with torch.compile as it is imported, which imports TorchDynamo and
  TorchInductor: a third of the CPU seconds of a start. zoo calls few of these functions, and on the CPU none.
- megatron-core imports flash-linear-attention, and this TorchDynamo, for three functions of its gated delta rule, in the place of
  which zoo has its own.
- transformers imports scikit-learn, which imports pandas, for one function of assisted generation, and scipy for one of a loss.
- megatron-core imports Transformer Engine wherever it is installed, under the torch backend too.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from zoo.config.checks.engine import uses_transformer_engine
from zoo.config.schema import Recipe
from zoo.deferred_imports import imported_at_call
from zoo.parallel.megatron.replaced import replaced

# Module -> its functions that megatron-core or transformers imports.
_OF_CORE = {
    "fla.modules.convolution": ("causal_conv1d",),
    "fla.modules.l2norm": ("l2norm",),
    "fla.ops.gated_delta_rule": ("chunk_gated_delta_rule",),
}
_OF_TRANSFORMERS = {"sklearn.metrics": ("roc_curve",), "scipy.optimize": ("linear_sum_assignment",)}


@contextmanager
def importing(*, own: bool = False) -> Iterator[None]:
    """Imports inside the block without garbage collections, which took 1 of 4.3 CPU seconds: modules keep nearly all that they make.

    `own`: in a process of zoo's own, later collections pass over what is there at the end of the block, too.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if own:
            gc.freeze()
        if enabled:
            gc.enable()


@importing()
def import_core() -> None:
    """Import megatron.core and what transformers' models are made of. To be called before any import of them.

    Functions that megatron-core gives to torch.compile are compiled at their first call, and functions of flash-linear-attention,
    scikit-learn and scipy are imported at theirs.
    """
    import torch

    with replaced(torch, compile=_at_first_call(torch.compile)):
        importlib.import_module("megatron.core")
        with imported_at_call(_OF_CORE):
            importlib.import_module("megatron.core.ssm.gated_delta_net")
    with imported_at_call(_OF_TRANSFORMERS):
        from transformers import GenerationMixin, PreTrainedModel  # noqa: F401  # it imports modules as they are asked for


def leave_out_transformer_engine(recipe: Recipe | None = None) -> None:
    """Make Transformer Engine look as if it were not installed, to all that this process imports from now on.

    Its import takes seconds, and megatron-core makes it for its own sake: a run under the torch backend has kernels of zoo's in
    the places where megatron-core would take Transformer Engine's (norm of the gradients, AdamW, router). This is for processes of zoo
    alone, since a caller's other code may want Transformer Engine. Nothing is done once megatron-core is imported, whose
    modules have to agree.

    Args:
        recipe: the only one that this process will run: nothing is done where its backend is Transformer Engine's. None:
            this process runs no model.
    """
    if recipe is not None and uses_transformer_engine(recipe):
        return
    if not {"megatron.core", "transformer_engine"} & sys.modules.keys() and find_spec("transformer_engine"):
        modules: Any = sys.modules
        modules["transformer_engine"] = None  # `import` raises ModuleNotFoundError, `find_spec` finds nothing


def _at_first_call(compile_now: Callable[..., Callable[..., object]]) -> Callable[..., object]:
    """torch.compile, as a decorator too, that waits until the function is called."""

    def later(function: Callable[..., object] | None = None, /, **options: object) -> Callable[..., object]:
        if function is None:
            return functools.partial(later, **options)
        compiled = functools.cache(lambda: compile_now(function, **options))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    return later
