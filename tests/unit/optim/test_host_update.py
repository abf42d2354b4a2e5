"""AdamW with a share of its state on the host: the same bits as without, whatever the chunks."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from zoo.nn.adamw.state import BLOCK, MOMENTS
from zoo.optim import host_update
from zoo.optim.adamw import AdamW
from zoo.parallel.megatron import cpu_host

SIZES = (1000, 300, 7, 0, 512)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(host_update, "CHUNK", 2 * BLOCK)  # 8 of them, through 4 buffers
    monkeypatch.setattr(host_update, "PIECE", BLOCK)
    with cpu_host.redirected():
        yield


def updated(share: float, weights: torch.dtype, grads: torch.dtype, moments: torch.dtype) -> AdamW:
    """An optimizer that has made five updates."""
    generator = torch.Generator().manual_seed(0)

    def random(size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    parameters = [torch.nn.Parameter(random(size).to(weights)) for size in SIZES]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}]
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    dtypes = {f"{name}_dtype": moments for name in MOMENTS}
    optimizer = AdamW(groups, offload=share, **options, **dtypes)
    for step in range(5):
        for parameter in parameters:
            parameter.decoupled_grad = random(parameter.numel()).to(grads)  # type: ignore[attr-defined]
        optimizer.clip = 0.5 if step % 2 else 1.0
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize(
    ("weights", "grads", "moments"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.uint8),
    ],
)
def test_updates_have_the_same_bits(
    share: float, weights: torch.dtype, grads: torch.dtype, moments: torch.dtype
) -> None:
    found, wanted = updated(share, weights, grads, moments), updated(0.0, weights, grads, moments)
    pairs = [
        pair
        for one, other in zip(found.param_groups, wanted.param_groups, strict=True)
        for pair in zip(one["params"], other["params"], strict=True)
        if pair[0].numel()
    ]
    assert 0 < sum(found.on_host(one) for one, _ in pairs) <= len(pairs)
    assert all(found.on_host(one) for one, _ in pairs) == (share == 1.0)
    assert not any(wanted.on_host(other) for _, other in pairs)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        for name, values in wanted.state[other].items():
            torch.testing.assert_close(found.state[one][name], values, rtol=0, atol=0, msg=f"{name}: {{}}".format)


def test_the_share_is_reached_from_below() -> None:
    sizes = [5, 40, 0, 30, 20, 5]
    for share in (0.0, 0.04, 0.1, 0.5, 0.95, 1.0):
        chosen = host_update.on_host(sizes, share)
        there = sum(size for size, taken in zip(sizes, chosen, strict=True) if taken)
        left = [size for size, taken in zip(sizes, chosen, strict=True) if not taken]
        assert there <= share * 100 and all(there + size > share * 100 for size in left)


def test_zeros_of_the_host_are_zeros_whatever_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_update, "TOUCHED", 2**14)
    work = host_update.HostUpdate(threads=2)
    for count in (0, 5, 2**14 + 3):
        for dtype in (torch.int16, torch.uint8, torch.float32):
            made = work.zeros(count, dtype)
            assert made.dtype == dtype and made.shape == (count,) and not made.any()
            made += 1  # it can be written to
