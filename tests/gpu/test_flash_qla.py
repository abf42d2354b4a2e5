"""FlashQLA's gated delta rule against the plain one, and a sample in rows of others."""

import importlib.util
from itertools import pairwise

import pytest
import torch
from support.on_gpu import ON_GPU
from torch import Tensor

from zoo.nn.decoder.attention.gated_delta_net import chunked_delta_rule, gated_delta_rule
from zoo.packing import PackedLayout

pytestmark = pytest.mark.skipif(
    not ON_GPU or importlib.util.find_spec("flash_qla") is None, reason="needs FlashQLA and a GPU"
)
LENGTHS = [(700, 64, 1, 130), (1, 3, 70), (1500,), tuple(range(40, 1640, 100))]


def inputs(tokens: int, values: int, seed: int = 0) -> list[Tensor]:
    """Query, key (T, 16, 128), value (T, values, 128), decay and beta (T, values), and the output's gradient."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    query, key = normal(tokens, 16, 128).bfloat16(), normal(tokens, 16, 128).bfloat16()
    value, grad = normal(tokens, values, 128).bfloat16(), normal(tokens, values, 128).bfloat16()
    decay = -normal(tokens, values).exp() * 0.2
    return [query, key, value, decay, normal(tokens, values).sigmoid().bfloat16(), grad]


def run(given: list[Tensor], lengths: tuple[int, ...], wanted: str) -> list[Tensor]:
    """Output, and gradients of the five inputs."""
    *tensors, grad = [x.detach().clone() for x in given]
    tensors = [x.requires_grad_() for x in tensors]
    layout = PackedLayout.from_lengths(lengths).to(torch.device("cuda"))
    out = (
        gated_delta_rule(*tensors, layout, wanted)
        if wanted == "flash_qla"
        else chunked_delta_rule(*tensors, lengths)[0]
    )
    return [out.detach(), *torch.autograd.grad(out, tensors, grad.to(out.dtype))]


@pytest.mark.parametrize("values", [16, 32])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_rule_and_its_gradients(lengths: tuple[int, ...], values: int, reports: list[str]) -> None:
    given = inputs(sum(lengths), values)
    found = run(given, lengths, "flash_qla")
    wanted = run([x.float() for x in given], lengths, "torch")
    errors = [float((x.float() - y).norm() / y.norm()) for x, y in zip(found, wanted, strict=True)]
    reports.append(f"flash_qla {lengths} x {values}: " + " ".join(f"{error:.1e}" for error in errors))
    assert max(errors) < 1e-2, errors


def test_a_sample_is_the_same_to_the_bit_in_any_row() -> None:
    lengths = LENGTHS[-1]
    given = inputs(sum(lengths), 16)
    packed = run(given, lengths, "flash_qla")
    ends = [sum(lengths[:place]) for place in range(len(lengths) + 1)]
    for start, end in pairwise(ends):
        alone = run([x[start:end] for x in given], (end - start,), "flash_qla")
        for whole, part in zip(packed, alone, strict=True):
            torch.testing.assert_close(whole[start:end], part, rtol=0, atol=0)
