"""Kernels that were found wrong, which zoo does not use: tried here to show whether they still are."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.doctor import references
from zoo.doctor.inputs import BOUNDS, row_shape, spans
from zoo.doctor.measure import Check, Trial
from zoo.doctor.sequence_checks import DELTA_RULE_BOUNDS, DeltaRuleSizes, delta_rule_trial
from zoo.nn.decoder.attention.delta_rule_settings import use_shipped_settings
from zoo.nn.decoder.attention.fla_import import import_fla
from zoo.nn.decoder.attention.gated_delta_net import fla_rule
from zoo.nn.decoder.attention.self_attention import SeqParams
from zoo.nn.decoder.attention.varlen import has_flash4, varlen_attention
from zoo.packing import PackedLayout
from zoo.types import JsonObject

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

LENGTHS = (1098, 771, 1300)  # the row with which both were found


def known_wrong_checks(device: torch.device, groups: ProcessGroupCollection) -> Iterator[Check]:
    """A check for each of these kernels that runs on this machine.

    `groups`: megatron-core's process groups of the one rank, which Transformer Engine's attention wants.
    """
    if device.type != "cuda":
        return
    layout = PackedLayout.from_lengths(LENGTHS, align=16).to(device)
    if importlib.util.find_spec("transformer_engine") is not None:
        for heads, kv_heads, width in ((8, 2, 256), (8, 8, 256), (8, 2, 128)):
            yield _te_attention(groups, layout, heads, kv_heads, width)
    if importlib.util.find_spec("fla") is not None:
        yield _delta_rule(layout)
    if has_flash4(torch.empty(0, 128, device=device)):
        for width in (72, 96):
            yield _flash4(PackedLayout.from_lengths(LENGTHS).to(device), width)


def _te_attention(groups: ProcessGroupCollection, layout: PackedLayout, heads: int, kv_heads: int, width: int) -> Check:
    def prepare() -> Trial:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(
            num_layers=1, hidden_size=heads * width, num_attention_heads=heads, num_query_groups=kv_heads,
            kv_channels=width, attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16,
        )  # fmt: skip
        core = TEDotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
        params = SeqParams.from_layout(layout)
        shapes = {"q": heads, "k": kv_heads, "v": kv_heads}
        inputs = {
            name: torch.randn(layout.total, count, width, device=layout.cu_seqlens.device, dtype=torch.bfloat16)
            for name, count in shapes.items()
        }

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = core(q, k, v, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=params)
            return out.reshape(layout.total, heads, width)

        def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return references.attention(q, k, v, spans(layout), width**-0.5, causal=True)

        return Trial(run, exact, inputs, real=~layout.padding_mask[0])

    shape = f"{heads} heads / {kv_heads} KV x {width}, {row_shape(layout)}"
    fix = "zoo uses PyTorch's attention for heads wider than 128"
    return Check(f"te_attention_{width}", "TEDotProductAttention", shape, "bf16", BOUNDS["bf16"], fix, prepare)


def _flash4(layout: PackedLayout, width: int) -> Check:
    """A tower's attention at a width of its own, to which nothing is padded."""
    heads = 16

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, layout.cu_seqlens, layout.max_seqlen, width**-0.5, causal=False, pad=False)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return references.attention(q, k, v, spans(layout), width**-0.5, causal=False)

    def prepare() -> Trial:
        where: JsonObject = {"device": layout.cu_seqlens.device, "dtype": torch.bfloat16}
        inputs = {name: torch.randn(layout.total, heads, width, **where) for name in "qkv"}
        return Trial(run, exact, inputs)

    shape = f"{heads} heads x {width}, {row_shape(layout)}"
    fix = "zoo pads heads of 72 and 80 to 96"
    return Check(f"flash4_{width}", "FlashAttention 4", shape, "bf16", BOUNDS["bf16"], fix, prepare)


def _delta_rule(layout: PackedLayout) -> Check:
    heads, width = 16, 128

    def run(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        use_shipped_settings()
        return fla_rule(q, k, v, decay, beta, layout)[0]

    def prepare() -> Trial:
        sizes = DeltaRuleSizes(heads, heads, width, width)
        return delta_rule_trial(layout.cu_seqlens.device, torch.bfloat16, layout, sizes, run)

    shape = f"{heads} heads x {width}, {row_shape(layout)}"
    fix = "pip install 'triton>=3.7.1', or engine.delta_rule=torch"
    return Check("delta_rule_fla", "fla, unrefused", shape, "bf16", DELTA_RULE_BOUNDS["bf16"], fix, prepare)


@contextmanager
def unrefused() -> Iterator[None]:
    """A context in which flash-linear-attention does not refuse its kernel for the installed Triton."""
    flag = "TRITON_ABOVE_3_7_1"
    there = importlib.util.find_spec("fla") is not None and torch.cuda.is_available()
    chunk_o = import_fla("fla.ops.common.chunk_o") if there else None
    if chunk_o is None or not hasattr(chunk_o, flag):
        yield
        return
    before = getattr(chunk_o, flag)
    setattr(chunk_o, flag, True)
    try:
        yield
    finally:
        setattr(chunk_o, flag, before)
