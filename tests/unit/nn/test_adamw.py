"""AdamW's compact state: what it keeps, what it rounds, and that its update is AdamW's."""

import pytest
import torch

from zoo.nn.adamw import state
from zoo.nn.adamw.state import FIRST, Moment, Part, dequantize, join, quantize, random_bits, split, to_bf16, update


def every_kind_of_float() -> torch.Tensor:
    """Random bits, all values of bf16, and the ties between them; (N,) fp32."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (500_000,), dtype=torch.int64, generator=generator).int()
    halves = (torch.arange(2**16) << 16).int()
    return torch.cat([bits, halves, halves + 0x8000]).view(torch.float32)


def test_a_split_weight_is_the_fp32_weight_bit_for_bit() -> None:
    values = every_kind_of_float()
    weight, remainder = split(values)
    number = ~values.isnan()
    torch.testing.assert_close(
        join(weight, remainder)[number].view(torch.int32), values[number].view(torch.int32), rtol=0, atol=0
    )
    torch.testing.assert_close(weight.isnan(), values.isnan(), rtol=0, atol=0)
    assert join(weight, remainder)[~number].isnan().all()
    finite = weight.isfinite() & values.isfinite()
    error, least = (weight.float() - values).abs()[finite], (values.bfloat16().float() - values).abs()[finite]
    assert bool((error == least).all())  # the nearest value; where two are as near, the other one of a tie


@pytest.mark.parametrize("signed", [True, False])
def test_eight_bits_hold_three_of_mantissa_and_are_themselves_again(signed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(10_001, generator=generator)
    values = values if signed else values.square()
    codes, exponents = quantize(values, signed, None)
    assert codes.dtype == exponents.dtype == torch.uint8 and len(exponents) == 79
    found = dequantize(codes, exponents, signed)
    large = values.abs() > 2**-11
    assert float(((found - values).abs() / values.abs())[large].max()) <= 1 / 16
    torch.testing.assert_close(dequantize(*quantize(found, signed, None), signed), found, rtol=0, atol=0)
    torch.testing.assert_close(found.bfloat16().float(), found, rtol=0, atol=0)  # so a checkpoint may hold them in bf16


def test_a_part_of_a_moment_is_read() -> None:
    moment = Moment.zeros(1000, torch.uint8, True, torch.device("cpu"))
    moment.write(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    whole = moment.read()
    for start, end in ((0, 1000), (5, 6), (127, 129), (128, 256), (300, 1000)):
        torch.testing.assert_close(moment.read(start, end), whole[start:end], rtol=0, atol=0)


def test_second_moments_never_become_zero() -> None:
    values = torch.tensor([1.0, 1e-20, 0.0] * 50)
    for random in (None, torch.zeros(150, dtype=torch.int64)):
        found = dequantize(*quantize(values, False, random), False)
        torch.testing.assert_close(found > 0, values > 0, rtol=0, atol=0)


def test_stochastic_rounding_has_no_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(4096, generator=generator) + 0.5
    rounds = [random_bits(4096, 5, step, FIRST, values.device) for step in range(200)]
    for mean in (
        sum(to_bf16(values, bits).double() for bits in rounds) / 200,
        sum(dequantize(*quantize(values, True, bits), True).double() for bits in rounds) / 200,
        sum(dequantize(*quantize(values, False, bits), False).double() for bits in rounds) / 200,
    ):
        relative = (mean - values) / values
        assert abs(float(relative.mean())) < 2e-4 and float(relative.abs().max()) < 0.03


def run(dtype: torch.dtype, half: bool, steps: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 weights, what PyTorch's AdamW makes of them) after updates on the same gradients, some clipped."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator)
    start = start.bfloat16().float() if half else start
    wanted = torch.nn.Parameter(start.clone())
    reference = torch.optim.AdamW([wanted], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    weight, remainder = split(start) if half else (start.clone(), None)
    first, second = (Moment.zeros(1000, dtype, signed, start.device) for signed in (True, False))
    for step in range(1, steps + 1):
        grad = torch.randn(1000, generator=generator) * 0.1 + 0.05
        clip = 0.5 if step % 7 == 0 else 1.0
        wanted.grad = grad * clip
        reference.step()
        update(
            Part(weight, remainder, grad, first, second, 3),
            step=step, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip=clip,
        )  # fmt: skip
    return (weight if remainder is None else join(weight, remainder)), wanted.detach()


@pytest.mark.parametrize("half", [False, True])
def test_with_moments_in_fp32_the_update_is_pytorchs(half: bool) -> None:
    found, wanted = run(torch.float32, half)
    assert float((found - wanted).abs().max()) < 1e-6


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 4e-3), (torch.uint8, 4e-2)])
def test_with_narrow_moments_it_stays_close(dtype: torch.dtype, most: float) -> None:
    found, wanted = run(dtype, True)
    moved = (wanted - wanted.mean()).norm()
    assert 0 < float((found - wanted).norm() / moved) < most


@pytest.mark.parametrize("signed", [True, False])
def test_a_moment_written_in_chunks_has_the_bits_of_the_whole(signed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000) if signed else torch.rand(1000)
    random = torch.randint(0, 2**31 - 1, (1000,), dtype=torch.int32)
    for bits in (None, random):
        whole, cut = (state.Moment.zeros(1000, torch.uint8, signed, torch.device("cpu")) for _ in range(2))
        whole.write(values, bits)
        monkeypatch.setattr(state, "CHUNK", 2 * state.BLOCK)
        cut.write(values, bits)
        monkeypatch.undo()
        torch.testing.assert_close(whole.values, cut.values, rtol=0, atol=0)
        torch.testing.assert_close(whole.exponents, cut.exponents, rtol=0, atol=0)
        cut.zero()
        assert float(cut.read().abs().max()) == 0.0
