"""mcore's transformer block with a forward that carries deepstack features and nothing of inference.

Deepstack (Qwen3-VL): features taken from several depths of a tower are added to the hidden states
of the first decoder layers, at the rows of that tower's tokens. They travel as an argument, never on a module,
so recompute and the pipeline see them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core import tensor_parallel
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from zoo.nn.autograd import on_host
from zoo.nn.decoder.attention.self_attention import SeqParams, attention_window
from zoo.nn.decoder.experts.exchange import ExpertExchange
from zoo.nn.decoder.experts.layer import MixtureOfExperts
from zoo.nn.decoder.experts.router import Routing
from zoo.nn.decoder.norm import RMSNorm
from zoo.nn.graphs.layers import Captured, LayerCall, LayerGraphs
from zoo.nn.graphs.row import StaticRow
from zoo.packing import PackedLayout

Angles = tuple[Tensor, Tensor]  # cos and sin (T, B, 1, D)


@dataclass(frozen=True)
class Deepstack:
    """Features for decoder layers `first`, `first + 1`, ... (0-based, counted over the whole model).

    rows: (N,) int64 rows of the flattened (T * B, hidden) states of this rank; features: one (N, hidden)
    tensor a layer.
    """

    rows: Tensor
    features: tuple[Tensor, ...]
    first: int = 0

    def add(self, hidden: Tensor, layer: int) -> Tensor:
        """hidden (T, B, C) with the features that are added after `layer`, if there are any."""
        index = layer - self.first
        if not 0 <= index < len(self.features):
            return hidden
        flat = hidden.reshape(-1, hidden.shape[-1])
        return flat.index_add(0, self.rows, self.features[index].to(flat.dtype)).view(hidden.shape)

    def after(self, layer: int) -> Deepstack:
        """The features that layers from `layer` on add."""
        return Deepstack(self.rows, self.features[max(0, layer - self.first) :], max(layer, self.first))


@dataclass
class NotedStates:
    """States within the decoder that something else reads: what comes out of a layer, before deepstack features are added to it.

    layer: counted from 1 over the whole model; 0: what goes into the first, the last one's number: what the final norm gives.
    alone: whether nothing behind it is wanted, so that the decoder ends there.
    states: (T, B, C), once the decoder has come to them.
    """

    layer: int
    alone: bool = False
    states: Tensor | None = None

    def at(self, layer: int, hidden: Tensor) -> bool:
        """Note what comes out of `layer`, if it is wanted; whether the decoder ends there."""
        if layer != self.layer:
            return False
        self.states = hidden
        return self.alone


class SandwichLayer(TransformerLayer):
    """mcore's layer with a norm behind attention and one behind the MLP, before what they give is added (Gemma 2 and later)."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        width, eps = self.config.hidden_size, self.config.layernorm_epsilon
        self.post_self_attn_layernorm = RMSNorm(self.config, width, eps)
        self.post_mlp_layernorm = RMSNorm(self.config, width, eps)
        self.self_attn_bda = partial(_add_normed, self.post_self_attn_layernorm)
        self.mlp_bda = partial(_add_normed, self.post_mlp_layernorm)
        if getattr(self.config, "layer_scale", False):
            self.layer_scalar = torch.nn.Parameter(torch.ones(1, dtype=self.config.params_dtype), requires_grad=False)

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """As megatron-core's, times a number that no update moves where the config has one."""
        out, context = super().forward(*args, **kwargs)
        scale = getattr(self, "layer_scalar", None)
        return (out if scale is None else out * scale), context


def _add_normed(norm: RMSNorm, training: bool, fused: bool) -> Callable[..., Tensor]:
    """mcore's bias, dropout and residual: here the norm and the sum."""

    def add(out_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        return residual + norm(out_and_bias[0])

    return add


def run_layer(
    layer: TransformerLayer,
    hidden: Tensor,
    rotary: tuple[Tensor, Tensor],
    seq_params: PackedSeqParams | None,
    padding_mask: Tensor | None,
    routing: Routing | None = None,
    exchange: ExpertExchange | None = None,
) -> Tensor:
    """One transformer layer of mcore, recomputed in the backward pass under full recompute, with the same experts.

    `exchange`: of tokens with other ranks' experts, where layers with experts share it.
    """

    def run(states: Tensor) -> Tensor:
        chosen = nullcontext() if routing is None else routing.on(layer)
        sparse = isinstance(layer.mlp, MixtureOfExperts)
        shared = layer.mlp.sharing(exchange) if sparse else nullcontext()
        with get_fp8_context(layer.config), chosen, shared:  # the first of no effect without engine.fp8
            return layer(
                hidden_states=states,
                attention_mask=None,
                rotary_pos_emb=rotary,
                packed_seq_params=seq_params,
                padding_mask=padding_mask,
            )[0]

    if not (layer.config.recompute_granularity == "full" and layer.training):
        return run(hidden)
    with on_host() if getattr(layer.config, "inputs_on_host", False) else nullcontext():
        out: Tensor = tensor_parallel.checkpoint(run, False, hidden)
    return out


class Decoder(TransformerBlock):
    """The decoder layers of this pipeline stage, and the final norm on the last.

    Attributes:
        graphs: the layers' CUDA graphs, where a run has them captured (`zoo.nn.graphs`).
    """

    graphs: LayerGraphs | None = None

    @property
    def last_layer(self) -> int:
        """One past the 0-based number, over the whole model, of this stage's last layer."""
        return self.layers[-1].layer_number

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        seq_params: PackedSeqParams | None,
        padding_mask: Tensor | None,
        deepstack: Deepstack | None,
        routing: Routing | None = None,
        local_rotary: Angles | None = None,
        most_tokens: int | None = None,
        noted: NotedStates | None = None,
    ) -> Tensor:
        """hidden (T, B, C); rotary cos and sin (T, B, 1, D); padding_mask (B, T), True on padding.

        `local_rotary`: the angles of layers that see a window, where these have their own. `most_tokens`: T B of the rank that has most,
        among those that exchange tokens, before sequence parallelism shares rows out; None: they ask one another.
        """
        graphs = self._graphs(hidden, rotary, seq_params, routing, local_rotary) if noted is None else None
        sparse = next((layer.mlp for layer in self.layers if isinstance(layer.mlp, MixtureOfExperts)), None)
        if most_tokens is not None and self.config.sequence_parallel:
            most_tokens //= self.config.tensor_model_parallel_size
        exchange = None if sparse is None else sparse.shared_exchange(hidden, most_tokens)
        if noted is not None and self.pre_process and noted.at(0, hidden):
            return hidden
        for index, layer in enumerate(self.layers):
            if graphs is not None:
                hidden = graphs(index, hidden)
            else:
                angles = self._angles(layer, rotary, local_rotary)
                hidden = run_layer(layer, hidden, angles, seq_params, padding_mask, routing, exchange)
            inner = layer.layer_number < self.config.num_layers
            if noted is not None and inner and noted.at(layer.layer_number, hidden):
                return hidden
            if deepstack:
                hidden = deepstack.add(hidden, layer.layer_number - 1)
        if self.final_layernorm is not None:
            hidden = self.final_layernorm(hidden)
        if noted is not None and self.post_process:
            noted.at(self.config.num_layers, hidden)
        return hidden

    def _angles(self, layer: TransformerLayer, rotary: Angles, local: Angles | None) -> Angles:
        """Those of a layer."""
        return local if local and attention_window(self.config, layer.layer_number) else rotary

    def _graphs(
        self,
        hidden: Tensor,
        rotary: Angles,
        seq_params: PackedSeqParams | None,
        routing: Routing | None,
        local: Angles | None,
    ) -> Captured | None:
        """The layers' graphs for a packed row of training, if it may run in them."""
        layout: PackedLayout | None = getattr(seq_params, "layout", None)
        if self.graphs is None or layout is None or routing is not None or not self.training:
            return None
        if seq_params is None or seq_params.cache is not None or seq_params.bidirectional.spans:
            return None
        angles = {"cos": rotary[0], "sin": rotary[1]}
        if local is not None:
            angles |= {"local cos": local[0], "local sin": local[1]}

        def runner(row: StaticRow) -> LayerCall:
            x, params = row.by_token, SeqParams.from_layout(row.layout())
            local_angles = (x["local cos"], x["local sin"]) if local is not None else None
            return lambda layer, states: run_layer(
                layer, states, self._angles(layer, (x["cos"], x["sin"]), local_angles), params, None
            )

        return self.graphs.begin(hidden, layout.num_segments, lambda row: row.fill(layout, angles), runner)
