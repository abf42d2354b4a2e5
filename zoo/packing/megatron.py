"""The one place that builds Megatron-Core's `PackedSeqParams`.

Guarantees: real and padded offsets both travel, lengths are Python ints, and building them never waits for a
device.
Costs: a few small copies; megatron is imported only when this is called, so the rest of the room needs torch
alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zoo.packing import index

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from torch.distributed import ProcessGroup


def packed_seq_params(
    lengths: Sequence[int],
    padded_lengths: Sequence[int],
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor,
    cp_group: ProcessGroup | None = None,
) -> PackedSeqParams:
    """Megatron-Core's description of a packed row; `PackedLayout.packed_seq_params` calls it.

    Args:
        lengths: S real lengths, in tokens.
        padded_lengths: S lengths with the packer's padding.
        cu_seqlens: (S+1,) int32 offsets of the real lengths, on the device where the result lives.
        cu_seqlens_padded: the same of the padded lengths.
        cp_group: for a run that changes its context-parallel group from call to call; None leaves mcore's own in use.

    Returns:
        Offsets and lengths of the whole row, before the context-parallel split, as mcore's THD kernels expect.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    fields: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "cu_seqlens_q_padded": cu_seqlens_padded,
        "cu_seqlens_kv_padded": cu_seqlens_padded,
        "max_seqlen_q": max(padded_lengths),
        "max_seqlen_kv": max(padded_lengths),
        "cp_group": cp_group,
    }
    known = {field.name for field in dataclasses.fields(PackedSeqParams)}
    if "pad_between_seqs" in known:
        fields["pad_between_seqs"] = sum(lengths) < sum(padded_lengths)
    if "seq_idx" in known:
        # (1, T) int32 segment of each token, padding counted to its segment, as mcore makes it itself.
        segments = index.owner(padded_lengths).to(torch.int32)[None]
        fields["seq_idx"] = index.host_to_device(segments, cu_seqlens.device)
    params = PackedSeqParams(**fields)
    if "total_tokens" in known:
        # Set afterwards: given to the constructor of mcore 0.19.2, it makes __post_init__ rebuild seq_idx
        # with a repeat_interleave on the device, whose output size the host has to wait for.
        params.total_tokens = sum(padded_lengths)
    return params
