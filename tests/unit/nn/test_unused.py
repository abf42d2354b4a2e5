"""Replaced forwards refuse what they don't do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from zoo.errors import UserError
from zoo.nn.decoder.attention.gated_delta_net import GatedDeltaNet
from zoo.nn.decoder.attention.self_attention import SelfAttention, VarlenCoreAttention
from zoo.nn.decoder.mlp import DenseMLP
from zoo.nn.decoder.unused_arguments import refuse_unused
from zoo.nn.towers.attention import tower_attention, use_varlen_attention

X = torch.zeros(4, 1, 2, 8)
MASK = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
CONFIG: Any = SimpleNamespace(
    kv_channels=8, context_parallel_size=1, attention_dropout=0.0, window_size=None, window_attn_skip_freq=None
)


def core(**changes: Any) -> VarlenCoreAttention:
    made: dict[str, Any] = {"config": CONFIG, "layer_number": 1, "pg_collection": SimpleNamespace(cp=None), **changes}
    return VarlenCoreAttention(**made)


def towers(**options: Any) -> Any:
    heads, offsets = torch.zeros(1, 2, 4, 8), torch.tensor([0, 4])
    usual: dict[str, Any] = {"attention_mask": None, "cu_seq_lens_k": offsets, "max_length_k": 4, "dropout": 0.0}
    options = usual | {"cu_seq_lens_q": offsets, "max_length_q": 4} | options
    return tower_attention(torch.nn.Module(), heads, heads, heads, scaling=1.0, **options)


NOBODY: Any = None
ASKED = [
    (lambda: SelfAttention.forward(NOBODY, X, MASK), "attention_mask"),
    (lambda: SelfAttention.forward(NOBODY, X, None, attention_bias=X), "attention_bias"),
    (lambda: SelfAttention.forward(NOBODY, X, None, inference_context=object()), "inference_context"),
    (lambda: GatedDeltaNet.forward(NOBODY, X, MASK), "attention_mask"),
    (lambda: GatedDeltaNet.forward(NOBODY, X, sequence_len_offset=X), "sequence_len_offset"),
    (lambda: DenseMLP.forward(NOBODY, X, per_token_scale=X), "per_token_scale"),
    (lambda: core()(X, X, X, MASK), "attention_mask"),
    (lambda: core()(X, X, X, attention_bias=X), "attention_bias"),
    (lambda: core()(X, X, X, attn_mask_type=AttnMaskType.no_mask), "attn_mask_type"),
    (lambda: core()(X[:, 0], X[:, 0], X[:, 0], packed_seq_params=PackedSeqParams()), "SeqParams"),
    (lambda: core(attn_mask_type=AttnMaskType.no_mask), "attn_mask_type"),
    (lambda: core(attention_type="cross"), "cross"),
    (lambda: core(attention_dropout=0.1), "attention_dropout"),
    (lambda: core(config=SimpleNamespace(**{**vars(CONFIG), "window_size": (4, 1)})), "window_size"),
    (lambda: towers(dropout=0.1), "dropout"),
    (lambda: towers(attention_mask=MASK), "attention_mask"),
    (lambda: towers(cu_seq_lens_k=torch.tensor([0, 2, 4])), "cu_seq_lens_k"),
    (lambda: towers(sliding_window=4), "sliding_window"),
]


@pytest.mark.parametrize("number", range(len(ASKED)))
def test_a_forward_refuses_what_it_does_not_do(number: int) -> None:
    call, name = ASKED[number]
    with pytest.raises(NotImplementedError, match=name):
        call()


def test_what_asks_for_nothing_passes() -> None:
    refuse_unused("it", {"dropout": 0.0, "is_causal": False, "offset": 0, "bias": None})
    assert towers()[0].shape == (1, 4, 2, 8)
    assert core(cp_comm_type="p2p", attn_mask_type=AttnMaskType.causal)(X, X, X).shape == X.shape


def test_a_tower_with_dropout_is_refused_when_it_is_built() -> None:
    tower = torch.nn.Linear(2, 2)
    tower.config = SimpleNamespace(attention_dropout=0.1)  # type: ignore[assignment]
    with pytest.raises(UserError, match="attention_dropout is"):
        use_varlen_attention(tower)
