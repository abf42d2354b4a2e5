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

AVOIDED = {  # fault -> the file of zoo that does the work instead
    "expert-bias-mask": "nn/decoder/experts/router.py",
    "mtp-rolls-by-real-offsets": "nn/decoder/mtp.py",
    "mrope-zigzags-the-pack": "nn/decoder/attention/rotary.py",
    "mrope-has-blocks-alone": "nn/decoder/attention/rotary.py",
    "torch-norm-without-sp": "nn/decoder/norm.py",
    "local-attention-refuses-packing": "nn/decoder/attention/self_attention.py",
    "padding-mask-not-scattered": "nn/multimodal.py",
    "gated-delta-rule-refuses-packing": "nn/decoder/attention/gated_delta_net.py",
    "gated-delta-net-waits-for-the-device": "packing/layout.py",
    "ep-overlap-drops-the-mask": "config/schema",
    "cp-batch-slices-four-keys": "steps/packed_step.py",
    "router-in-tf32": "nn/decoder/experts/router.py",
    "z-loss-averages-ranks": "nn/decoder/experts/router.py",
    "llava-keeps-old-offsets": "packing/placeholder.py",
    "experts-one-by-one": "nn/decoder/experts/grouped.py",
    "weights-gathered-twice": "parallel/weight_gathering.py",
    "mixed-dtypes-swap-states": "parallel/megatron/inner_optimizer.py",
    "ddp-is-never-freed": "training/optimization.py",
}


def shim(name: str) -> compat.Shim:
    return next(s for s in compat.SHIMS if s.name == name)


def remove_me(name: str) -> NoReturn:
    """The installed megatron-core no longer has the fault."""
    what = f"what zoo/{AVOIDED[name]} does instead" if name in AVOIDED else "its shim in zoo/parallel/megatron"
    pytest.fail(f"fixed in megatron-core: remove {name} from docs/megatron-faults.md, and {what}")


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
