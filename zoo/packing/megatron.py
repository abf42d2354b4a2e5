"""The one place that builds Megatron-Core's `PackedSeqParams`.

Guarantees: real and padded offsets both travel, lengths are Python ints, and building them never waits for a
device.
Costs: a few small copies; megatron is imported only when this is called, so the rest of the room needs torch
alone.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zoo.packing import index

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from torch.distributed import ProcessGroup

    from zoo.packing.layout import PackedLayout


def packed_seq_params(layout: PackedLayout, cp_group: ProcessGroup | None = None) -> PackedSeqParams:
    """Megatron-Core's packing facts of a layout, with tensors on `layout.device`.

    Offsets and lengths are those of the whole row, before the context-parallel split, as mcore's THD kernels
    expect. `cp_group` is for a run that changes its group from call to call; None leaves mcore's own group in
    use.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    facts: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": layout.cu_seqlens,
        "cu_seqlens_kv": layout.cu_seqlens,
        "cu_seqlens_q_padded": layout.cu_seqlens_padded,
        "cu_seqlens_kv_padded": layout.cu_seqlens_padded,
        "max_seqlen_q": layout.max_seqlen,
        "max_seqlen_kv": layout.max_seqlen,
        "cp_group": cp_group,
    }
    known = {field.name for field in dataclasses.fields(PackedSeqParams)}
    if "pad_between_seqs" in known:
        facts["pad_between_seqs"] = layout.real_tokens < layout.total
    if "seq_idx" in known:
        facts["seq_idx"] = _sequence_index(layout)
    params = PackedSeqParams(**facts)
    if "total_tokens" in known:
        # Set afterwards: given to the constructor of mcore 0.19.2, it makes __post_init__ rebuild seq_idx
        # with a repeat_interleave on the device, whose output size the host has to wait for.
        params.total_tokens = layout.total
    return params


def _sequence_index(layout: PackedLayout) -> Tensor:
    """(1, T) int32 segment of each token, padding counted to its segment, as mcore makes it itself."""
    return index.host_to_device(index.owner(layout.padded_lengths).to(torch.int32)[None], layout.device)
