"""Which kernel a width goes to, decided without a GPU: kernels that refuse it are never called."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from zoo.errors import ConfigError
from zoo.nn import backend
from zoo.nn.decoder.attention import gated_delta_net, varlen
from zoo.nn.decoder.attention.self_attention import VarlenCoreAttention
from zoo.nn.decoder.experts import products
from zoo.nn.kernels import widths
from zoo.nn.towers import attention as tower_attention


@pytest.mark.parametrize(
    ("takes", "yes", "no"),
    [
        (widths.flash_takes, (8, 24, 72, 256), (0, 4, 20, 33, 264)),
        (widths.flash4_width, (64, 72, 96, 128, 256), (24, 112, 192)),
        (widths.te_attention_takes, (24, 64, 128), (20, 136, 256)),
        (widths.grouped_takes, (8, 96, 768), (0, 14, 20, 100)),
        (widths.quack_takes, (128, 136, 768), (0, 64, 132)),
    ],
)
def test_a_kernel_says_which_widths_it_takes(takes: Any, yes: tuple[int, ...], no: tuple[int, ...]) -> None:
    assert all(takes(width) for width in yes) and not any(takes(width) for width in no)


def test_kernels_of_several_widths() -> None:
    assert widths.grouped_takes(40, 16) and not widths.grouped_takes(40, 14)
    assert widths.fla_takes(32, 128) and not widths.fla_takes(20, 128) and not widths.fla_takes(512, 64)
    assert widths.te_linears_take([40, 128]) and not widths.te_linears_take([40, 131])


class OnGpu:
    """Says that it is on a GPU, as `is_cuda` can't be set on a tensor."""

    is_cuda, dtype = True, torch.bfloat16

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.dtype = shape, dtype


@pytest.mark.parametrize(("hidden", "width", "one_call"), [(40, 16, True), (40, 14, False), (36, 16, False)])
def test_experts_of_an_odd_width_go_one_by_one(hidden: int, width: int, one_call: bool) -> None:
    for weight in ((2, 2 * width, hidden), (2, hidden, width)):
        takes = products.grouped(OnGpu(5, weight[2]), OnGpu(*weight))  # type: ignore[arg-type]
        assert takes == (one_call or (weight[1] % 8 == 0 and weight[2] % 8 == 0))
        assert not products.grouped(OnGpu(5, weight[2], dtype=torch.float32), OnGpu(*weight))  # type: ignore[arg-type]


def test_an_adapter_of_odd_rank_goes_one_by_one_beside_a_grouped_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in one call of the layer, and both right."""
    calls: list[tuple[int, ...]] = []

    def grouped_mm(x: Any, weight: Any, offs: Any) -> torch.Tensor:
        calls.append(tuple(weight.shape))
        starts = [0, *offs.tolist()]
        return torch.cat([x[a:b] @ weight[i] for i, (a, b) in enumerate(pairwise(starts))])

    monkeypatch.setattr(F, "grouped_mm", grouped_mm)
    monkeypatch.setattr(products, "grouped", lambda x, weight: widths.grouped_takes(*weight.shape[1:]))
    x, weight, adapter = torch.randn(5, 8), torch.randn(2, 16, 8), torch.randn(2, 3, 8)
    bounds = torch.tensor([0, 2, 5])
    for one in (weight, adapter):
        wanted = torch.cat([x[:2] @ one[0].t(), x[2:] @ one[1].t()])
        torch.testing.assert_close(products.multiply(x, one, bounds), wanted)
    assert calls == [(2, 8, 16)]


def decoder(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    sizes = {
        "hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 32, "ffn_hidden_size": 256,
        "tensor_model_parallel_size": 1, "attention_output_gate": False, "moe_shared_expert_intermediate_size": None,
        "linear_attention_freq": None, "params_dtype": dtype, "fp8": None, "window_size": None, "window_attn_skip_freq": None,
    }  # fmt: skip
    return SimpleNamespace(**{**sizes, **changes})


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [({}, "TorchBackend"), ({"fp8": "hybrid"}, "TEBackend"), ({"fp8_blocks": True}, "FP8Backend")],
)
def test_auto_is_torch_but_for_fp8_by_tensor(changes: dict[str, Any], wanted: str) -> None:
    assert type(backend.get_backend("auto", decoder(**changes))).__name__ == wanted


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"hidden_size": 130}, False),
        ({"ffn_hidden_size": 132}, False),
        ({"ffn_hidden_size": 136, "tensor_model_parallel_size": 2}, False),
        ({"moe_shared_expert_intermediate_size": 14}, False),
        ({"linear_num_value_heads": 3}, False),  # 6 of its outputs are heads' gates
        ({"linear_num_value_heads": 4}, True),
    ],
)
def test_transformer_engine_is_refused_for_odd_widths(changes: dict[str, int], taken: bool) -> None:
    if "linear_num_value_heads" in changes:
        changes = changes | {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        changes["linear_attention_freq"] = [1]  # type: ignore[assignment]
    if taken:
        assert isinstance(backend.get_backend("te", decoder(**changes)), backend.TEBackend)
    else:
        with pytest.raises(ConfigError, match=r"divide by 8.*engine\.backend=torch"):
            backend.get_backend("te", decoder(**changes))


def test_transformer_engine_is_refused_in_fp32() -> None:
    with pytest.raises(ConfigError, match="TF32"):
        backend.get_backend("te", decoder(torch.float32))
    assert isinstance(backend.get_backend("te", decoder()), backend.TEBackend)


@pytest.mark.parametrize("width", [20, 256])
def test_heads_that_transformer_engine_does_not_take_are_pytorchs(width: int) -> None:
    assert backend.core_attention(decoder(kv_channels=width), backend.TEBackend()) is VarlenCoreAttention


def test_attention_asks_for_the_width() -> None:
    for width, takes in ((20, False), (24, True), (264, False)):
        assert varlen.has_flash(OnGpu(5, 2, width)) is takes  # type: ignore[arg-type]


def test_the_delta_rule_asks_for_both_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta_net, "has_fla", lambda x: True)
    monkeypatch.setattr(gated_delta_net, "fla_fault", lambda: None)
    values: Any = OnGpu(5, 2, 32)
    assert gated_delta_net.delta_rule_kernel(values, key_width=32) == "fla"
    assert gated_delta_net.delta_rule_kernel(values, key_width=20) == "torch"
    assert gated_delta_net.delta_rule_kernel(OnGpu(5, 2, 20), key_width=32) == "torch"  # type: ignore[arg-type]


def test_a_tower_with_heads_of_an_odd_width_takes_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower_attention, "fused", lambda x: True)  # as in half precision on a GPU
    monkeypatch.setattr(tower_attention, "varlen_attention", lambda *args, **options: pytest.fail("a kernel"))

    class Attention(torch.nn.Module):
        num_heads = 2

        def forward(self, hidden: Any, offsets: Any, **options: Any) -> Any:
            return "its own way"

    angles = (torch.ones(3, 20), torch.ones(3, 20))
    found = tower_attention._attend(Attention(), torch.zeros(3, 40), torch.tensor([0, 3]), angles, 3)
    assert found == "its own way"
