"""The gated delta rule by FlashQLA (Qwen's TileLang kernels, flash-qla): one kernel each way, and three small ones, in the place of nine.

Its functions for the forward and the backward pass are called one by one, as `flash_qla.chunk_gated_delta_rule` would have
torch.compile make the norms and wait for the device. Segments are not cut to fill the GPU (its `auto_cp`): where they are cut follows
from the other segments of a row, and a sample's result would depend on what it is packed with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.nn.autograd import Context
from zoo.nn.decoder.attention.fla_import import import_fla
from zoo.packing import PackedLayout
from zoo.packing.index import cpu_to_device, offsets

HEAD = 128  # the width of keys and values


def flash_qla_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, layout: PackedLayout
) -> Tensor:
    """`gated_delta_net.gated_delta_rule` of query, key (T, H, 128) and value (T, G, 128) in half precision on a GPU."""
    segments = layout.kept("delta rule of FlashQLA", lambda: _segments(layout))
    out: Tensor = _Rule.apply(*(x[None].contiguous() for x in (query, key, value, decay, beta)), segments)
    return out[0]


def _segments(layout: PackedLayout) -> Tensor:
    """(S + 1,) int64 offsets on the device; the chunks that follow from them are made on the host and kept with them."""
    from flash_qla.utils.index import prepare_varlen_metadata

    on_host = offsets(layout.padded_lengths).long()
    return prepare_varlen_metadata(cpu_to_device(on_host, layout.device), on_host)


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, segments: Tensor
    ) -> Tensor:
        from flash_qla import chunk_gated_delta_rule_fwd

        norm = import_fla("fla.modules.norm.l2norm")
        (query, of_query), (key, of_key) = norm.l2norm_fwd(query), norm.l2norm_fwd(key)
        decay, solved, out, *_ = chunk_gated_delta_rule_fwd(
            query, key, value, decay, beta, output_final_state=False, cu_seqlens=segments, auto_cp=False
        )
        ctx.save_for_backward(query, of_query, key, of_key, value, decay, beta, solved)
        ctx.segments = segments  # not among the saved tensors: what is kept with it would be lost
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from flash_qla import chunk_gated_delta_rule_bwd

        query, of_query, key, of_key, value, decay, beta, solved = ctx.saved_tensors
        of_rule = chunk_gated_delta_rule_bwd(
            query, key, value, decay, beta, solved, grads[0].contiguous(), cu_seqlens=ctx.segments, auto_cp=False
        )
        d_query, d_key, d_value, d_beta, d_decay, _ = of_rule
        norm = import_fla("fla.modules.norm.l2norm")
        d_query, d_key = norm.l2norm_bwd(query, of_query, d_query), norm.l2norm_bwd(key, of_key, d_key)
        return d_query, d_key, d_value, d_decay, d_beta, None
