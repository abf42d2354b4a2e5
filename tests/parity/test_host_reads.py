"""A packed step never asks the device for a number: lengths, offsets and placements are known on the host.

There is no GPU here, but once `prepare` has moved its tensors all that the model meets is what would lie on one. So
every read of a tensor on the host is written down while forward pass, loss and backward pass run, with the line that
does it. On a GPU, tests/unit/packing holds the packing itself to the same with CUDA's own sync debug mode.
"""

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Zoo, packed_batch
from support.rows import vision_examples
from support.tiny_qwen35 import write_tiny_qwen35
from torch import Tensor
from torch.overrides import TorchFunctionMode

import zoo
from zoo.nn.decoder.attention import delta_inputs

NAMES = "item tolist numpy cpu nonzero masked_select unique __bool__ __int__ __float__ __index__ __contains__"
READS = {getattr(Tensor, name) for name in NAMES.split()} | {torch.nonzero, torch.masked_select, torch.unique}
REPEATS = {Tensor.repeat_interleave, torch.repeat_interleave}  # by a tensor, the size of what comes out is asked for
PACKAGE = Path(zoo.__file__).parent


class HostReads(TorchFunctionMode):
    """Writes down, while it is entered, which line reads a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[Path, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        second = args[1] if len(args) > 1 else None
        by_mask = func is Tensor.__getitem__ and isinstance(second, Tensor) and second.dtype == torch.bool
        by_tensor = func in REPEATS and isinstance(second, Tensor) and "output_size" not in kwargs
        if func in READS or by_mask or by_tensor:
            stack = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
            where = next(frame for frame in reversed(stack) if frame.name != "__torch_function__")
            self.lines.append((Path(where.filename), f"{where.filename}:{where.lineno}: {where.line}"))
        return func(*args, **kwargs)

    @property
    def ours(self) -> list[str]:
        """Lines of zoo that could be the layout's: not those of sizes of media, and of tokens that went to each expert."""
        others = ("towers/attention.py", "experts/products.py")
        ours = [(file, line) for file, line in self.lines if file.is_relative_to(PACKAGE)]
        return [line for file, line in ours if not any(file.match(name) for name in others)]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory, cpu_world: Any) -> Zoo:
    folder = write_tiny_qwen35(tmp_path_factory.mktemp("host_reads"), moe=True, mtp=1)
    return Zoo.load(folder, cpu_world, "model.family=qwen35_vl")


def reads(model: Zoo, names: tuple[str, ...]) -> HostReads:
    """The reads of device values in one training step on the named rows, packed with padding, once the host has done its part."""
    examples = vision_examples(model.assembly.processor)
    step = model.step(align=8)
    inputs, loss_inputs = step.prepare(packed_batch([examples[name].sample for name in names]))
    with HostReads() as found:
        loss, _ = step.loss(step.forward(model.model, inputs), loss_inputs, 1.0, False)
        loss.backward()
    model.model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("names", [("image-long", "video-short", "text-short"), ("text-long", "text-short")], ids=str)
def test_nothing_is_read_for_the_layout(names: tuple[str, ...], hybrid: Zoo) -> None:
    """Softmax and linear attention, experts, multi-token prediction and towers."""
    found = reads(hybrid, names)
    assert not found.ours, "\n".join(found.ours)
    # transformers' tower would read the sizes of its media, had `prepare` not worked out what it makes of them.
    elsewhere = [line for file, line in found.lines if not file.is_relative_to(PACKAGE)]
    assert not elsewhere, "\n".join(elsewhere)


def test_a_read_is_seen(hybrid: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """One `.item()` in a layer is written down at each of its calls, forward, and not by its neighbours."""
    plain = delta_inputs.causal_convolution

    def reading(x: Tensor, weight: Tensor, layout: Any) -> Tensor:
        assert layout.cu_seqlens[-1].item() == layout.real_tokens
        return plain(x, weight, layout)

    monkeypatch.setattr(delta_inputs, "causal_convolution", reading)
    seen = [line for file, line in reads(hybrid, ("text-long",)).lines if file == Path(__file__)]
    linear = sum(kind == "linear_attention" for kind in hybrid.assembly.config.text.layer_types)
    assert len(seen) == 3 * linear > 0  # of queries, keys and values
    assert all("layout.cu_seqlens[-1].item()" in line for line in seen)
