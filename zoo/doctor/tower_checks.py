"""Checks of towers: their attention, and a whole block where zoo fuses its kernels."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zoo.doctor import references
from zoo.doctor.inputs import fused_name, make_check, randn, row_shape, spans, varlen_name
from zoo.doctor.layers import Subject, TowerHeads
from zoo.doctor.measure import Check, Trial
from zoo.nn.towers.attention import NAME as VARLEN_TOWER
from zoo.packing import PackedLayout
from zoo.types import JsonObject

BLOCK_BOUNDS = {"bf16": 3e-2, "fp32": 1e-3}  # a chain of eight kernels, each rounded
PATCHES = (1024, 16, 576, 400, 4, 256)  # lengths of the images in a tower's row


def tower_checks(subject: Subject) -> Iterator[Check]:
    """Checks of every tower of a subject."""
    for tower in subject.towers:
        yield _tower(subject, tower)
        if tower.block is not None:
            yield _tower_block(subject, tower)


def _images(subject: Subject, varlen: bool = True) -> PackedLayout:
    """Images side by side in a tower's row; one where the tower takes them one by one."""
    lengths: tuple[int, ...] = PATCHES if varlen else (576,)
    if subject.device.type == "cpu":
        lengths = tuple(max(1, n // 8) for n in lengths)
    return PackedLayout.from_lengths(lengths).to(subject.device)


def _tower_block(subject: Subject, tower: TowerHeads) -> Check:
    """A whole block against its own modules in fp64: sums, norms and MLP are fused where attention is."""
    layout, meta = _images(subject), tower.block
    assert meta is not None

    def prepare() -> Trial:
        block: Any = copy.deepcopy(meta).to_empty(device=subject.device).to(subject.dtype)
        with torch.no_grad():
            for name, parameter in block.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, parameter.shape[1] ** -0.5)
                else:
                    parameter.normal_(float("norm" in name and name.endswith("weight")), 0.25)
        plain = copy.deepcopy(block).double()
        angles = torch.randn(layout.total, tower.width // 2, device=subject.device).repeat(1, 2)
        arguments = {"position_embeddings": (angles.cos(), angles.sin()), "max_seqlen": max(layout.lengths)}

        def exact(x: Tensor, **parameters: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(plain, parameters, (x, layout.cu_seqlens), arguments)
            return out

        x = randn(subject, layout.total, *block.norm1.weight.shape)
        parameters = dict(block.named_parameters())
        return Trial(lambda x: block(x, layout.cu_seqlens, **arguments), exact, {"x": x}, parameters)

    shape = f"{tower.heads} heads x {tower.width}, {row_shape(layout)}"
    return make_check(subject, f"{tower.tower}_block", fused_name(subject), shape, prepare, BLOCK_BOUNDS)


def _tower(subject: Subject, tower: TowerHeads) -> Check:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    heads, width, varlen = tower.heads, tower.width, tower.implementation == VARLEN_TOWER
    layout = _images(subject, varlen)
    function = ALL_ATTENTION_FUNCTIONS[tower.implementation]

    def prepare() -> Trial:
        offsets = layout.cu_seqlens
        lengths: JsonObject = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets} if varlen else {}
        if varlen:
            lengths |= dict.fromkeys(("max_length_q", "max_length_k"), max(layout.lengths))

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out, _ = function(
                tower.module, q, k, v, attention_mask=None, scaling=width**-0.5, dropout=0.0, is_causal=False, **lengths
            )
            return out[0]

        def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return references.attention(q, k, v, spans(layout), width**-0.5, causal=False)

        q, k, v = (randn(subject, layout.total, heads, width) for _ in range(3))
        return Trial(run, exact, {"q": q, "k": k, "v": v})

    kernel = varlen_name(subject, width) if varlen else tower.implementation
    shape = f"{heads} heads x {width}, {row_shape(layout)}"
    return make_check(subject, f"{tower.tower}_attention", kernel, shape, prepare)
