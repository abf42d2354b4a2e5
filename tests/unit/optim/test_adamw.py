"""The factor that clips gradients is that of PyTorch."""

from types import SimpleNamespace

import pytest
import torch

from zoo.optim import adamw


@pytest.mark.parametrize(("most", "scale"), [(1.0, 3.0), (0.5, 100.0), (1.0, 0.01), (0.0, 3.0)])
def test_gradients_are_clipped_to_the_norm(most: float, scale: float) -> None:
    gradient = scale * torch.randn(64, generator=torch.Generator().manual_seed(0))
    inner = SimpleNamespace(clip=1.0)
    chained = [SimpleNamespace(is_stub_optimizer=False, optimizer=inner), SimpleNamespace(is_stub_optimizer=True)]
    adamw.clip(
        SimpleNamespace(chained_optimizers=chained, config=SimpleNamespace(clip_grad=most)), float(gradient.norm())
    )
    parameter = torch.nn.Parameter(torch.zeros(64))
    parameter.grad = gradient.clone()
    if most:
        torch.nn.utils.clip_grad_norm_([parameter], most)
    torch.testing.assert_close(gradient * inner.clip, parameter.grad)
