"""Products in FP8, scaled by blocks: formats, gradients, and megatron-core's linears around them."""

from typing import Any

import pytest
import torch
from support.engine import single_process_world

from zoo.nn.fp8 import blocks
from zoo.nn.fp8.linear import fp8_linear
from zoo.nn.weight_gradients import accumulate_in_place


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("shape", [(1, 128), (37, 272), (128, 64)])
def test_activations_are_a_code_times_a_power_of_two(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.logspace(-6, 6, shape[0])[:, None]).bfloat16()
    found = blocks.quantize_activations(x)
    assert found.codes.shape[0] % 16 == 0 and found.codes.shape[1] % 128 == 0 and found.dense().shape[0] == shape[0]
    assert set(torch.frexp(found.scales).mantissa.unique().tolist()) == {0.5}
    dense = found.dense()
    assert float(((dense[:, : shape[1]] - x.float()).abs() / x.float().abs().clamp(min=1e-30)).median()) < 2**-4
    assert float(dense[:, shape[1] :].abs().sum()) == 0.0
    assert found.codes.float().abs().max() <= 448
    torch.testing.assert_close(dense, dense.bfloat16().float(), rtol=0, atol=0)


def test_a_token_s_codes_do_not_depend_on_its_neighbours() -> None:
    x = torch.randn(40, 256).bfloat16()
    whole, part = blocks.quantize_activations(x).dense(), blocks.quantize_activations(x[7:20] * 1.0).dense()
    torch.testing.assert_close(whole[7:20], part, rtol=0, atol=0)


def test_zeros_and_values_at_the_borders() -> None:
    x = torch.zeros(3, 128, dtype=torch.bfloat16)
    x[1] = 1e15
    x[2] = torch.finfo(torch.bfloat16).tiny
    dense = blocks.quantize_activations(x).dense()
    assert bool(dense.isfinite().all()) and float(dense[0].abs().max()) == 0.0
    assert apart(dense[1], x[1]) < 2**-4
    ones = blocks.quantize_activations(torch.tensor([[448.0], [449.0]]).expand(2, 128).bfloat16()).scales
    assert ones[:2, 0].tolist() == [1.0, 1.0]  # 449 is 448 in bf16
    assert blocks.quantize_activations(torch.full((1, 128), 450.0).bfloat16()).scales[0, 0] == 2.0


@pytest.mark.parametrize("shape", [(128, 128), (272, 400), (16, 1152)])
def test_a_weight_and_its_transpose_have_the_same_codes(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, dtype=torch.bfloat16)
    plain, turned = blocks.quantize_weight(weight), blocks.quantize_weight(weight, transposed=True)
    assert plain.scales.shape[1] % 4 == 0 and turned.scales.shape[1] % 4 == 0
    dense = plain.dense()[:, : shape[1]]
    torch.testing.assert_close(dense, turned.dense()[:, : shape[0]].t(), rtol=0, atol=0)
    assert 0.01 < apart(dense, weight) < 0.03


def test_the_gradient_is_that_of_rounded_products() -> None:
    """The input's gradient comes from rounded weight and gradient, the weight's from both as they are."""
    torch.manual_seed(0)
    x = torch.randn(2, 50, 144, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(304, 144, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(2, 50, 304, dtype=torch.bfloat16)
    out = fp8_linear(x, weight)
    out.backward(grad)
    rows, slopes = x.detach().flatten(0, 1), grad.flatten(0, 1)
    codes = blocks.quantize_weight(weight.detach()).dense()[:, :144]
    wanted = blocks.quantize_activations(rows).dense()[:, :144] @ codes.t()
    torch.testing.assert_close(out.flatten(0, 1), wanted.bfloat16())
    assert 0.01 < apart(wanted, rows.float() @ weight.float().t()) < 0.05
    of_input = blocks.quantize_activations(slopes).dense()[:, :304] @ codes
    assert x.grad is not None and weight.grad is not None
    torch.testing.assert_close(x.grad.flatten(0, 1), of_input.bfloat16())
    torch.testing.assert_close(weight.grad, slopes.t() @ rows)


def test_a_frozen_weight_keeps_no_input() -> None:
    x = torch.randn(8, 128, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(128, 128, dtype=torch.bfloat16)
    out: Any = fp8_linear(x, weight)
    assert out.grad_fn.saved_tensors[0] is None
    out.sum().backward()
    assert x.grad is not None


def test_gradients_are_added_to_the_buffer() -> None:
    """As the torch backend's linears add theirs: DDP sees that it was done, and adds nothing. In bf16: a CPU doesn't add to fp32."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from zoo.nn.fp8.linear import FP8ColumnLinear, FP8RowLinear

    config = TransformerConfig(
        num_layers=1, hidden_size=128, num_attention_heads=1, params_dtype=torch.bfloat16, bf16=True, use_cpu_initialization=True
    )  # fmt: skip
    with single_process_world() as world:
        shared: dict[str, Any] = {"config": config, "init_method": config.init_method, "tp_group": world.groups.tp}
        shared |= {"bias": False, "skip_bias_add": False}
        column = FP8ColumnLinear(128, 256, gather_output=False, **shared)
        linears = column, FP8RowLinear(256, 128, input_is_parallel=True, **shared)
        x = torch.randn(20, 1, 128, dtype=torch.bfloat16, requires_grad=True)

        def run() -> None:
            out = x
            for linear in linears:
                out, _ = linear(out)
            out.float().square().sum().backward()

        run()
        wanted = [linear.weight.grad.float() for linear in linears]
        for linear in linears:
            linear.weight.grad = None
            linear.weight.main_grad = torch.zeros_like(linear.weight)
            linear.weight.grad_added_to_main_grad = False
        assert accumulate_in_place([torch.nn.ModuleList(linears)]) == 2
        run()
        run()
        for linear, want in zip(linears, wanted, strict=True):
            assert linear.weight.grad_added_to_main_grad
            assert apart(linear.weight.main_grad, 2 * want) < 1e-2
