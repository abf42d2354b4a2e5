"""Every fault that a shim fixes is there without the shim and gone with it; a test fails once megatron-core has fixed the fault itself."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.megatron_faults import OnTheCpu, group, mcore_config, remove_me, shim, shows
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.parallel.megatron import compat


def test_one_sum_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed import param_and_grad_buffer as buffers

    sent: list[int] = []
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda *_, **__: sent.append(1))
    values = torch.ones(2, dtype=torch.bfloat16)
    options: dict[str, Any] = {"op": torch.distributed.ReduceOp.SUM, "async_op": False}
    before = buffers.dist_reduce_scatter_func, buffers.reduce_scatter_with_fp32_accumulation
    buffers.reduce_scatter_with_fp32_accumulation(values, values, group=group(1), **options)
    if not sent and "global dist_reduce_scatter_func" not in inspect.getsource(buffers):
        remove_me("one-sum-of-gradients")
    sent.clear()
    with compat.installed():
        assert buffers.dist_reduce_scatter_func is buffers.reduce_scatter_with_fp32_accumulation
        buffers.dist_reduce_scatter_func(values, values, group=group(1), **options)
        assert not sent
        buffers.dist_reduce_scatter_func = before[1]  # as every group of buckets of a model does
    assert (buffers.dist_reduce_scatter_func, buffers.reduce_scatter_with_fp32_accumulation) == before


class _Products(TorchDispatchMode):
    """Names of the matrix products that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.__name__:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_frozen_products_one_by_one() -> None:
    from megatron.core.tensor_parallel import layers

    x = torch.randn(1, 6, 4).transpose(0, 1).requires_grad_()  # (T, 1, in), as a layer's tokens
    weight, bias = torch.randn(3, 4), torch.randn(3)

    def outcome() -> tuple[list[str], torch.Tensor, torch.Tensor]:
        with _Products() as products:
            out = layers.linear_with_frozen_weight(x, weight, bias, False, False, False, tp_group=group(1))
            (gradient,) = torch.autograd.grad(out.square().sum(), x)
        return products.names, out, gradient

    one_by_one, *wanted = outcome()
    if not any("bmm" in name for name in one_by_one):
        remove_me("frozen-products-one-by-one")
    with compat.installed():
        once, *found = outcome()
    assert once == ["mm.default", "mm.default"]
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other)


def test_norms_one_by_one(on_the_cpu: OnTheCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import utils

    read: list[torch.Tensor] = []
    as_float, make = torch.Tensor.__float__, torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *values, device=None, **options: make(*values, **options))
    monkeypatch.setattr(torch.Tensor, "__float__", lambda x: read.append(x) or as_float(x))
    gradients = [torch.full((3,), 2.0), torch.full((4,), 1.0)]
    broken, _ = utils.local_multi_tensor_l2_norm(0, None, [gradients], False)
    if not read:
        remove_me("norms-one-by-one")
    read.clear()
    fixed, _ = compat.l2_norm(0, None, [gradients], False)
    assert not read
    torch.testing.assert_close(fixed, broken, rtol=0, atol=0)
    assert fixed.item() == 4.0
    compat.scale_in_place(0, None, [gradients, gradients], 0.5)
    compat.scale_in_place(0, None, [[], []], 0.5)  # of a rank that holds no gradient
    assert gradients[0].tolist() == [1.0] * 3


def test_aux_scale_has_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler as Scaler

    def step_outside_then_inside_of_a_schedule() -> None:
        monkeypatch.setattr(Scaler, "main_loss_backward_scale", None)
        loss = torch.ones((), requires_grad=True)
        Scaler.apply(torch.ones(2, requires_grad=True), loss).sum().backward()
        Scaler.set_loss_scale(torch.full((1,), 0.5))
        Scaler.apply(torch.ones(2, requires_grad=True), loss).sum().backward()
        assert float(loss.grad) == 1.5

    with shows("aux-scale-has-one-shape", RuntimeError):
        step_outside_then_inside_of_a_schedule()
    with shim("aux-scale-has-one-shape").apply():
        step_outside_then_inside_of_a_schedule()


def gated_delta_net() -> Any:
    """mcore's layer, 2 heads of 4 channels, with nothing but identities around its own weights."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules

    dims = dict.fromkeys(("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"), 4)
    heads = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
    config = mcore_config(**dims, **heads, perform_initialization=False)
    groups = SimpleNamespace(tp=group(1), cp=group(1))
    return GatedDeltaNet(config, GatedDeltaNetSubmodules(), pg_collection=groups)


def test_gated_delta_net_needs_fla(monkeypatch: pytest.MonkeyPatch, on_the_cpu: OnTheCpu) -> None:
    from megatron.core.ssm.gated_delta_net import common, gdn

    monkeypatch.setattr(common, "HAVE_FLA", False)  # as where flash-linear-attention is not installed
    monkeypatch.setattr(gdn, "chunk_gated_delta_rule", None)
    with shows("gated-delta-net-needs-fla", ImportError, AssertionError):
        gated_delta_net()
    with shim("gated-delta-net-needs-fla").apply():
        layer = gated_delta_net()
    assert layer.conv1d.weight.shape == (24, 1, 4)  # queries, keys and values


@pytest.mark.parametrize("async_op", [False, True])
def test_parts_of_ranks_are_summed_in_fp32_and_rounded_once(async_op: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = torch.tensor([[256.0, 1.0], [1.0, 2.0], [1.0, 3.0]], dtype=torch.bfloat16)
    waited = []
    handle = SimpleNamespace(wait=lambda: waited.append(1)) if async_op else None

    def exchange(received: torch.Tensor, sent: torch.Tensor, **_: Any) -> Any:
        received.copy_(parts.flatten())
        return handle

    monkeypatch.setattr(torch.distributed, "all_to_all_single", exchange)
    out = torch.zeros(2, dtype=torch.bfloat16)
    group = SimpleNamespace(size=lambda: 3)
    found = compat.reduce_scatter(
        out, torch.zeros(6, dtype=torch.bfloat16), op=torch.distributed.ReduceOp.SUM, group=group, async_op=async_op
    )
    if async_op:
        assert found is not None and not out.any()
        found.wait()
    assert out.tolist() == [258.0, 6.0], "in bf16, 256 + 1 is 256"
    assert len(waited) == async_op


def test_other_gradients_are_summed_by_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.distributed, "reduce_scatter_tensor", lambda *_, **options: asked.append(options))
    whole = torch.ones(4)
    options: dict[str, Any] = {"op": torch.distributed.ReduceOp.AVG, "group": SimpleNamespace(size=lambda: 2)}
    compat.reduce_scatter(whole[:2], whole, async_op=False, **options)
    assert asked == [{"async_op": False, **options}]
