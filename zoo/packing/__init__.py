"""Sequence packing as pure tensor code: the layout of a packed row, token-budget bins, placeholder expansion.

It imports torch alone; Megatron-Core is met only inside `PackedLayout.packed_seq_params`.
"""

from zoo.packing.binning import BinPacker, deal_bins, plan_bins
from zoo.packing.layout import PackedLayout
from zoo.packing.placeholder import Expansion, already_expanded, expand_index, placeholder_counts

__all__ = [
    "BinPacker",
    "Expansion",
    "PackedLayout",
    "already_expanded",
    "deal_bins",
    "expand_index",
    "placeholder_counts",
    "plan_bins",
]
