"""Multi-token prediction: at every token, layers that predict the tokens after the next (DeepSeek-V3, arXiv 2412.19437).

Depth k (1, 2, ...) at token t joins what depth k-1 knows at t (depth 0: the decoder's output) with the embedding of
token t+k and predicts token t+k+1. One projection, two norms and a final norm serve all depths, each of which has a
transformer layer of its own (Qwen3.5's `mtp.*`).

Data layout, worked through: lengths 3 and 2, padded to 4 each; `_` is padding.

    slot                       0   1   2   3   4   5   6   7
    token ids                  a   b   c   _   x   y   _   _
    labels                     .   b   c   .   .   y   .   .      (. carries no loss)
    decoder predicts           b   c   .   .   y   .   .   .
    depth 1 reads the id of    b   c   0   0   y   0   0   0      (token t+1; 0 at a real end and on padding)
    depth 1 predicts           c   .   .   .   .   .   .   .      (token t+2)
    depth 1 router counts      1   1   0   0   1   0   0   0      (tokens that have read a real token)

Every row is made on the host from the whole row, before the context-parallel split, by indices global to the row: a
token's successor may lie on another rank, and the split by `layout.cp_index` then hands each rank what it needs. So
nothing is exchanged between ranks, neither one boundary token nor one exchange a segment, at any CP size. Padded
offsets are all there is to go wrong: `PackedStep` rolls by the index within the segment and by `padding_mask`, and
asserts that no successor lies outside its segment.

Rotary positions are those of token t, as megatron-core trains and as vLLM decodes; embeddings of media come from the
towers, as in the decoder, not from the placeholders' rows of the embedding.
"""

from __future__ import annotations

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from zoo.nn.decoder.block import run_layer


class MultiTokenPrediction(MegatronModule):
    """The depths' shared parts and their transformer layers."""

    def __init__(
        self, config: TransformerConfig, backend: BackendSpecProvider, layer: ModuleSpec, groups: ProcessGroupCollection
    ) -> None:
        """`layer`: of a transformer layer, one of which is built a depth (config.mtp_num_layers)."""
        super().__init__(config=config)
        assert config.mtp_num_layers is not None
        self.tp_group = groups.tp
        norm = backend.layer_norm(rms_norm=True)
        width, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm, self.hnorm, self.final_layernorm = (norm(config, width, eps) for _ in range(3))
        self.eh_proj = build_module(
            backend.column_parallel_linear(),
            2 * width,
            width,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=groups.tp,
        )
        self.layers = torch.nn.ModuleList(
            build_module(layer, config=config, layer_number=depth + 1, is_mtp_layer=True, pg_collection=groups)
            for depth in range(config.mtp_num_layers)
        )

    def forward(
        self,
        depth: int,
        hidden: Tensor,
        embedded: Tensor,
        rotary: tuple[Tensor, Tensor],
        seq_params: PackedSeqParams | None,
        padding_mask: Tensor,
    ) -> Tensor:
        """What depth `depth` (from 0) knows: (T', B, hidden), of the depth before it and the embeddings of tokens t+k.

        `hidden` and `embedded` are this rank's share under sequence parallelism, `padding_mask` (B, T') too.
        """
        joined, _ = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        joined = gather_from_tensor_model_parallel_region(joined, group=self.tp_group)
        if self.config.sequence_parallel:
            joined = scatter_to_sequence_parallel_region(joined, group=self.tp_group)
        states = run_layer(self.layers[depth], joined, rotary, seq_params, padding_mask)
        return self.final_layernorm(states)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """As every megatron-core module's, and the layers as they cut themselves.

        The default takes a plain ModuleList for whole on every rank of tensor parallelism.
        """
        sharded = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        layers: list[MegatronModule] = list(self.layers)
        for depth, layer in enumerate(layers):
            sharded.update(layer.sharded_state_dict(f"{prefix}layers.{depth}.", sharded_offsets, metadata))
        return sharded
