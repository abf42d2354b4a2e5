"""The trainer's weights into vLLM's model: when it is built, and later in the place of those at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from zoo.errors import UserError

FORMAT = "zoo"  # vLLM's load_format

type Weights = Iterator[tuple[str, Tensor]]
"""Published names and whole tensors, which all ranks ask for together."""


def register(weights: Callable[[], Weights]) -> None:
    """Have vLLM's models of the load format FORMAT begin with these weights.

    vLLM's own "dummy" weights would not do: they overwrite buffers that no checkpoint has, too.
    """
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class Loader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            _load(model, model.load_weights, weights())

    model_loader._LOAD_FORMAT_TO_MODEL_LOADER[FORMAT] = (
        Loader  # register_model_loader warns of the second engine of a process
    )


def reload(worker: Any, weights: Weights) -> None:
    """Load weights into the model of a vLLM's worker that has been built."""
    model = worker.get_model()
    if worker.device.type == "cpu":
        _forget_experts(model)
    load = model.load_weights
    model.load_weights = lambda weights: _load(model, load, weights)
    try:
        worker.reload_weights(weights_iterator=weights)
    finally:
        del model.load_weights


def _forget_experts(model: Any) -> None:
    """Have experts be packed anew: vLLM's kernels of a CPU keep those of the first weights (0.32, `_setup_kernel`)."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _load(model: Any, load: Callable[[Weights], set[str]], weights: Weights) -> set[str]:
    """Names of the weights of a model that were loaded; UserError where some were not sent."""
    wanted = {name for name, _ in model.named_parameters()}
    loaded = load(_made_by_zoo(weights))
    # vLLM tells experts by names without the module that holds them, as 0.26 does (`MoERunner.load_weights`; 0.32 tells them whole).
    if missing := sorted(name for name in wanted - loaded if name.replace(".routed_experts.", ".") not in loaded):
        raise UserError(
            f"rl.rollout=vllm: vLLM's {type(model).__name__} has {len(missing)} weights that zoo does not send, of which {missing[0]} "
            "is the first; take rl.rollout=zoo"
        )
    return loaded


def _made_by_zoo(weights: Weights) -> Weights:
    """The same, made under torch's own default device and dtype, where vLLM has others while it loads."""
    while True:
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with torch.device("cpu"), torch.no_grad():
                item = next(weights, None)
        finally:
            torch.set_default_dtype(dtype)
        if item is None:
            return
        yield item
