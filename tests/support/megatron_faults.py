"""What tests of faults of megatron-core share: stand-ins for its groups and configs, and how a test asks for a removal."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch.overrides import TorchFunctionMode

from zoo.parallel.megatron import compat
from zoo.parallel.megatron.avoided import AVOIDED, Avoided


def shim(name: str) -> compat.Shim:
    return next(s for s in compat.SHIMS if s.name == name)


def remove_me(name: str) -> NoReturn:
    """The installed megatron-core no longer has the fault."""
    fault = next(f for f in (*compat.SHIMS, *AVOIDED) if f.name == name)
    what = f"what zoo does instead: {fault.instead}" if isinstance(fault, Avoided) else "the shim"
    pytest.fail(f"fixed in megatron-core: remove {name} from zoo/parallel/megatron, and {what}")


@contextmanager
def shows(name: str, *signs: type[Exception], match: str = "") -> Iterator[None]:
    """The fault is that the block raises one of `signs`."""
    try:
        yield
    except signs as error:
        assert re.search(match, str(error)), error
    else:
        remove_me(name)


def group(size: int, rank: int = 0) -> Any:
    """Stands in for a process group where nothing is sent."""
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def mcore_config(**values: Any) -> Any:
    """A TransformerConfig of one layer, 8 channels and 2 heads."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **values)


class OnTheCpu(TorchFunctionMode):
    """Lets code that names CUDA make its tensors on the CPU, and lists the calls that read a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if func is torch.Tensor.cuda:
            return args[0]
        if func in (torch.Tensor.item, torch.Tensor.tolist):
            self.read.append(func.__name__)
        return func(*args, **kwargs)
