"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): momentum of a matrix, orthogonalised.

With G the gradient, b the momentum and W (m, n) the weights:

    M = b M + (1 - b) G,  D = (1 - b) G + b M  (Nesterov),  W = W (1 - lr decay) - lr 0.2 sqrt(max(m, n)) orthogonal(D)

The factor 0.2 sqrt(max(m, n)) gives the update the root mean square that AdamW's usually has, so that one learning rate and
one weight decay serve both (Liu et al. 2025, "Muon is scalable for LLM training", arXiv:2502.16982, section 2.2).
`torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` makes the same update.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zoo.nn.adamw.state import FIRST, Moment, random_bits

# Jordan's quintic polynomial a x + b x^3 + c x^5 of singular values: the steepest at zero; it maps (0, 1] to some [0.7, 1.2].
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
LEAST_NORM = 1e-7  # of a matrix; a smaller one is divided by this


def orthogonalized(matrices: Tensor) -> Tensor:
    """(B, m, n) with singular values near 1 in the place of their own: Newton-Schulz iteration, in the matrices' dtype."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=LEAST_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def newton_schulz_flops(rows: int, columns: int) -> float:
    """FLOPs of `orthogonalized` for one matrix."""
    short, long = sorted((rows, columns))
    return STEPS * (4.0 * short**2 * long + 2.0 * short**3)


def rms_scale(rows: int, columns: int) -> float:
    """Factor of the learning rate under which an orthogonal matrix's update has the root mean square 0.2 lr."""
    return 0.2 * math.sqrt(max(rows, columns))


def advance(exp_avg: Moment, grad: Tensor, *, momentum: float, clip: float, seed: int, step: int) -> Tensor:
    """Take a gradient (N,) into the moving average, and return (N,) fp32 to orthogonalise: Nesterov's look ahead.

    Args:
        clip: factor of the gradient.
        seed, step: of the random bits that round an average in fewer than 32 bits.
    """
    slope = grad.float() if clip == 1.0 else grad.float() * clip
    mean = exp_avg.read().lerp_(slope, 1.0 - momentum)
    ahead = slope.lerp(mean, momentum)
    narrow = exp_avg.values.dtype != torch.float32
    exp_avg.write(mean, random_bits(mean.numel(), seed, step, FIRST, mean.device) if narrow else None)
    return ahead
