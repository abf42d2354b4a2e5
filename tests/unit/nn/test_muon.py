"""Muon's parts: singular values near 1, the polynomial and the momentum of torch.optim.Muon."""

import pytest
import torch
from torch.optim import Muon
from torch.optim import _muon as reference

from zoo.nn.adamw.state import Moment
from zoo.nn.muon import advance, newton_schulz_flops, orthogonalized, rms_scale


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32), (1, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_come_near_1(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    found = orthogonalized(matrices.to(dtype))
    assert found.dtype == dtype and found.shape == matrices.shape
    values = torch.linalg.svdvals(found.float())
    assert float(values.min()) > 0.3 and float(values.max()) < 1.3
    if dtype == torch.bfloat16:
        for one, wanted in zip(found, matrices, strict=True):
            wanted = reference._zeropower_via_newtonschulz(wanted, (3.4445, -4.7750, 2.0315), 5, 1e-7)
            assert float((one - wanted).abs().max()) < 0.02
            assert float((one - wanted).float().norm() / wanted.float().norm()) < 5e-3


def test_a_matrix_of_zeros_stays_one() -> None:
    assert not orthogonalized(torch.zeros(2, 8, 4)).any()


def test_matrices_in_a_stack_do_not_meet() -> None:
    generator = torch.Generator().manual_seed(0)
    small, large = torch.randn(2, 8, 12, generator=generator) * torch.tensor([1e-6, 1e3]).view(2, 1, 1)
    both = orthogonalized(torch.stack([small, large]))
    alone = torch.cat([orthogonalized(one[None]) for one in (small, large)])
    assert torch.allclose(both, alone, atol=1e-6)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01), (torch.uint8, 0.08)])
def test_momentum_is_that_of_torch(dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten updates of one matrix, by what is orthogonalised, in every form of the average; clipping scales gradients."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(
        reference, "_zeropower_via_newtonschulz", lambda update, *_: seen.append(update.clone()) or update
    )
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(16, 20))
    optimizer = Muon([weight], lr=0.0, momentum=0.9)
    average = Moment.zeros(320, dtype, True, torch.device("cpu"))
    for step in range(1, 11):
        weight.grad = torch.randn(16, 20, generator=generator)
        optimizer.step()
        found = advance(average, 4 * weight.grad.flatten(), momentum=0.9, clip=0.25, seed=0, step=step)
        assert float((found - seen[-1].flatten()).norm() / found.norm()) < error


def test_scale_and_flops() -> None:
    assert rms_scale(64, 16) == rms_scale(16, 64) == 0.2 * 8
    # Two products of (m, n) by (n, m) and (m, m) by (m, n), and one of (m, m) by (m, m), five times.
    assert newton_schulz_flops(30, 10) == newton_schulz_flops(10, 30) == 5 * (2 * 2 * 10 * 10 * 30 + 2 * 10**3)
