"""How FlashQLA is asked for and called: here by functions of its form in plain PyTorch; its kernels are tried in tests/gpu."""

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.errors import UserError
from zoo.nn.decoder.attention import delta_rule_settings, flash_qla, gated_delta_net
from zoo.nn.decoder.attention.gated_delta_net import chunked_delta_rule
from zoo.packing import PackedLayout

LENGTHS = (70, 3, 1, 130)
HEADS = SimpleNamespace(shape=(5, 2, 128))


class Norm:
    """The two functions of flash-linear-attention's module of norms."""

    @staticmethod
    def l2norm_fwd(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = (x.square().sum(-1) + 1e-6).rsqrt()
        return x * scale[..., None], scale

    @staticmethod
    def l2norm_bwd(y: Tensor, scale: Tensor, grad: Tensor) -> Tensor:
        return (grad - (grad * y).sum(-1, keepdim=True) * y) * scale[..., None]


def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> tuple[Any, ...]:
    assert options["auto_cp"] is False and options["output_final_state"] is False
    out, _ = chunked_delta_rule(*(x[0] for x in (q, k, v, g, beta)), tuple(options["cu_seqlens"].host))
    return g + 1, torch.ones(1), out[None], None, None, None


def backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, solved: Tensor, grad: Tensor, **options: Any
) -> tuple[Tensor | None, ...]:
    torch.testing.assert_close(solved, torch.ones(1), rtol=0, atol=0)
    assert options["auto_cp"] is False
    tensors = [x[0].detach().requires_grad_() for x in (q, k, v, g - 1, beta)]
    with torch.enable_grad():
        out, _ = chunked_delta_rule(*tensors, tuple(options["cu_seqlens"].host))
    *others, of_g, of_beta = (x[None] for x in torch.autograd.grad(out, tensors, grad[0]))
    return *others, of_beta, of_g, None  # in this order


def prepare(segments: Tensor, on_host: Tensor) -> Tensor:
    assert segments.dtype == torch.int64
    segments.host = on_host.diff().tolist()  # type: ignore[attr-defined]
    return segments


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("flash_qla")
    package.chunk_gated_delta_rule_fwd, package.chunk_gated_delta_rule_bwd = forward, backward
    index: Any = ModuleType("flash_qla.utils.index")
    index.prepare_varlen_metadata = prepare
    for name, module in (("flash_qla", package), ("flash_qla.utils", ModuleType("utils")), (index.__name__, index)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flash_qla, "import_fla", lambda name: Norm)


def test_each_input_gets_its_gradient(library: None) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = sum(LENGTHS)
    tensors = [normal(tokens, 2, 6), normal(tokens, 2, 6), normal(tokens, 4, 5)]
    tensors += [-normal(tokens, 4).exp(), normal(tokens, 4).sigmoid()]
    tensors, weight = [x.requires_grad_() for x in tensors], normal(tokens, 4, 5)
    out = flash_qla.flash_qla_rule(*tensors, PackedLayout.from_lengths(LENGTHS))
    found = torch.autograd.grad((out * weight).sum(), tensors)
    plain, _ = chunked_delta_rule(*tensors, LENGTHS)
    wanted = torch.autograd.grad((plain * weight).sum(), tensors)
    for got, want in zip((out, *found), (plain, *wanted), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_it_works_the_rule_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta_net, "has_fla", lambda x: True)
    monkeypatch.setattr(gated_delta_net, "fla_fault", lambda: None)
    values: Any = HEADS
    assert gated_delta_net.delta_rule_kernel(values, "flash_qla", 128) == "flash_qla"
    assert gated_delta_net.delta_rule_kernel(values, "auto", 128) == "fla"
    for width in (64, 20):  # 20: flash-linear-attention takes none of that width either
        told = f"take heads of 128 alone, and these are of {width} and 128; leave engine"
        with pytest.raises(UserError, match=told):
            gated_delta_net.delta_rule_kernel(values, "flash_qla", width)
    monkeypatch.setattr(gated_delta_net, "has_fla", lambda x: False)  # fp32, or to the bit
    assert gated_delta_net.delta_rule_kernel(values, "flash_qla", 128) == "torch"


def test_the_library_keeps_to_its_own_kernels_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLA_TILELANG", raising=False)
    monkeypatch.setenv("FLA_FLASH_QLA", "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (0, 0))
    delta_rule_settings.use_shipped_settings.cache_clear()
    try:
        delta_rule_settings.use_shipped_settings()
        assert (os.environ["FLA_TILELANG"], os.environ["FLA_FLASH_QLA"]) == ("0", "1")
    finally:
        delta_rule_settings.use_shipped_settings.cache_clear()
        os.environ.pop("FLA_TILELANG", None)
