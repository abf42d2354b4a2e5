"""Plain references of the kernels: loops over segments in PyTorch, in the dtype of their inputs (fp64).

Segments are (start, stop) of their real tokens in a row. Between them stands padding, where a reference returns zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Spans = Sequence[tuple[int, int]]


def by_segment(function: Callable[..., Tensor], spans: Spans, *rows: Tensor) -> Tensor:
    """`function` of each segment of the rows (T, ...), put back in their places."""
    total, pieces, offset = len(rows[0]), [], 0
    for start, stop in spans:
        out = function(*(row[start:stop] for row in rows))
        pieces += [out.new_zeros(start - offset, *out.shape[1:]), out]
        offset = stop
    return torch.cat([*pieces, pieces[-1].new_zeros(total - offset, *pieces[-1].shape[1:])])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Spans,
    scale: float,
    causal: bool,
    window: int | None = None,
    runs: Spans = (),
) -> Tensor:
    """softmax(q k^T scale) v within each segment: q (T, H, D), k and v (T, G, D) -> (T, H, D).

    A token sees the `window` tokens up to itself, all where that is None; those of one of `runs` see it to its end.
    """
    ends = torch.arange(len(q), device=q.device)
    for start, stop in runs:
        ends[start:stop] = stop - 1

    def segment(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, positions: Tensor) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if causal:
            scores = scores.masked_fill(positions > ends[:, None], -torch.inf)
        if window is not None:
            scores = scores.masked_fill(positions <= positions[:, None] - window, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)

    return by_segment(segment, spans, q, k, v, ends, torch.arange(len(q), device=q.device))


def convolution(x: Tensor, weight: Tensor, spans: Spans) -> Tensor:
    """silu of the depthwise causal convolution of x (T, C) by weight (C, K), zeros before each segment."""
    width = weight.shape[1]

    def segment(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, width - 1, 0))
        return F.silu(sum(padded[i : i + len(x)] * weight[:, i] for i in range(width)))  # type: ignore[arg-type]

    return by_segment(segment, spans, x)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, spans: Spans) -> Tensor:
    """The gated delta rule of `zoo.nn.decoder.attention.gated_delta_net`, a segment in one piece rather than by chunks.

    From a state of zeros the corrections u_t = beta_t (v_t - S'^T k_t) solve one unit lower triangular system over the
    whole segment, and the output is out_t = sum over i <= t of exp(g_i+1 + ... + g_t) (q_t . k_i) u_i / sqrt(K).
    """

    def segment(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        repeats = v.shape[1] // q.shape[1]
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(repeats, 1).transpose(0, 1) for x in (q, k))  # (G, L, K)
        total, beta = decay.cumsum(0).T, beta.T  # (G, L)
        later = torch.ones(len(v), len(v), dtype=torch.bool, device=v.device).triu(1)
        between = (total[:, :, None] - total[:, None, :]).masked_fill(later, -torch.inf).exp()
        system = (k @ k.mT) * between * beta[..., None]
        wanted = v.transpose(0, 1) * beta[..., None]
        updates = torch.linalg.solve_triangular(system.tril(-1), wanted, upper=False, unitriangular=True)
        return ((q @ k.mT) * between @ updates).transpose(0, 1) * q.shape[-1] ** -0.5

    return by_segment(segment, spans, q, k, v, decay, beta)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean of squares + eps) * weight over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotary(x: Tensor, positions: Tensor, axes: Sequence[int], frequencies: Sequence[float], amplitude: float) -> Tensor:
    """x (T, H, D) turned in the pairs (i, i + R/2) of its first R channels, R = 2 * len(axes), and made longer by `amplitude`.

    positions (A, T); pair i turns by positions[axes[i]] * frequencies[i].
    """
    half = len(axes)
    angle = positions.to(x.dtype)[list(axes)].T * torch.tensor(frequencies, dtype=x.dtype, device=x.device)  # (T, R/2)
    cos, sin = (amplitude * part[:, None] for part in (angle.cos(), angle.sin()))
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def experts(x: Tensor, probs: Tensor, first: Tensor, second: Tensor, counts: Sequence[int]) -> Tensor:
    """SwiGLU experts on x (N, hidden) sorted by expert: first (E, 2I, hidden), gate half in front; second (E, hidden, I)."""
    outputs = []
    for expert, (rows, prob) in enumerate(zip(x.split(list(counts)), probs.split(list(counts)), strict=True)):
        gate, up = (rows @ first[expert].T).chunk(2, dim=-1)
        outputs.append((F.silu(gate) * up * prob[:, None]) @ second[expert].T)
    return torch.cat(outputs)


def cross_entropy(x: Tensor, weight: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(x[rows] weight^T)[targets]: x (T, hidden), weight (vocab, hidden) -> (N,)."""
    logits = x[rows] @ weight.T
    return logits.logsumexp(-1) - logits.gather(-1, targets[:, None])[:, 0]
