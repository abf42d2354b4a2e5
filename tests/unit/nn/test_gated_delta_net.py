"""The gated delta rule and its causal convolution against transformers' and a plain loop, segment by segment."""

import pytest
import torch
from torch import Tensor

from zoo.nn.decoder.attention.delta_inputs import causal_convolution
from zoo.nn.decoder.attention.gated_delta_net import _kernel_offsets, chunked_delta_rule
from zoo.nn.graphs.row import CHUNK
from zoo.packing import PackedLayout

LENGTHS = [(1,), (5,), (CHUNK,), (3, 1, 70), (130, 64, 2, 200), (1, 1, 1)]


def inputs(tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Query, key (T, 2, 6), value (T, 4, 5), decay and beta (T, 4) in float64, needing gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads = normal(tokens, 2, 6), normal(tokens, 2, 6), normal(tokens, 4, 5)
    return tuple(x.requires_grad_() for x in (*heads, -normal(tokens, 4).exp(), normal(tokens, 4).sigmoid()))


def loop(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """One segment by the recurrence itself, as the docstring of `gated_delta_rule` states it."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(value.shape[1] // x.shape[1], 1) for x in (query, key))
    state = value.new_zeros(value.shape[1], key.shape[-1], value.shape[-1])
    out = []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()[:, None, None]
        error = v - torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("h,hk,hv->hkv", b, k, error)
        out.append(torch.einsum("hkv,hk->hv", state, q) * q.shape[-1] ** -0.5)
    return torch.stack(out)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_rule_is_the_recurrence(lengths: tuple[int, ...]) -> None:
    """Output and gradients of a packed row are those of each segment by itself."""
    tensors = inputs(sum(lengths))
    weight = torch.randn(sum(lengths), 4, 5, generator=torch.Generator().manual_seed(1))
    out, _ = chunked_delta_rule(*tensors, lengths)
    found = torch.autograd.grad((out * weight).sum(), tensors)
    pieces = zip(*(x.split(lengths) for x in tensors), strict=True)
    plain = torch.cat([loop(*piece) for piece in pieces])
    wanted = torch.autograd.grad((plain * weight).sum(), tensors)
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5, check_dtype=False)
    for got, want in zip(found, wanted, strict=True):
        assert float((got - want).norm()) <= 1e-5 * float(want.norm())


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_convolution_starts_anew_at_each_segment(lengths: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(lengths), 7, generator=generator)
    weight = torch.randn(7, 4, generator=generator)
    out = causal_convolution(x, weight, PackedLayout.from_lengths(lengths))

    def alone(piece: Tensor) -> Tensor:
        padded = torch.nn.functional.conv1d(piece.T[None], weight[:, None], padding=3, groups=7)
        return torch.nn.functional.silu(padded[0, :, : len(piece)].T)

    torch.testing.assert_close(out, torch.cat([alone(piece) for piece in x.split(lengths)]))


def test_what_stands_in_another_segment_does_not_matter() -> None:
    lengths = (70, 30, 129)
    first, second = (inputs(sum(lengths), seed) for seed in (0, 1))
    mixed = [torch.cat((a[:70], b[70:100], a[100:])) for a, b in zip(first, second, strict=True)]
    plain, other = chunked_delta_rule(*first, lengths)[0], chunked_delta_rule(*mixed, lengths)[0]
    torch.testing.assert_close(plain[:70], other[:70], rtol=0, atol=0)
    torch.testing.assert_close(plain[100:], other[100:], rtol=0, atol=0)
    assert not torch.equal(plain[70:100], other[70:100])


def test_what_the_kernels_are_told_of_a_row() -> None:
    """Offsets, and segment and number of each chunk."""
    offsets = _kernel_offsets(PackedLayout.from_lengths((CHUNK + 6, 1, 2 * CHUNK)))
    assert offsets["cu_seqlens"].tolist() == [0, CHUNK + 6, CHUNK + 7, 3 * CHUNK + 7]
    assert offsets["chunk_indices"].tolist() == [[0, 0], [0, 1], [1, 0], [2, 0], [2, 1]]
