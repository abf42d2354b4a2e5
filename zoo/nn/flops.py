"""FLOPs of an architecture, read from its config, as `zoo.packing.cost` counts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zoo.nn.decoder.config import full_heads, windowed_layers
from zoo.nn.family import FamilyConfig
from zoo.nn.graphs.row import CHUNK
from zoo.packing.cost import DecoderCost, LayerKind, ModelCost

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def model_cost(config: FamilyConfig, mtp_layers: int = 0) -> ModelCost:
    """What a sample costs a model of that config, with so many layers of multi-token prediction."""
    text = config.text
    kinds = layer_kinds(text)
    layers = [_layer(config, kind) for kind in kinds]
    windowed = windowed_layers(text) or [False] * len(layers)
    near = sum(layer.per_pair for layer, short in zip(layers, windowed, strict=True) if short)
    # Multi-token prediction: a projection of two widths to one, and a layer that attends and is like the last.
    ahead = [_layer(config, LayerKind(False, kinds[-1].sparse))] * mtp_layers
    joined = 4.0 * text.hidden_size**2 * mtp_layers
    return ModelCost(
        decoder=DecoderCost(
            per_token=sum(layer.per_token for layer in (*layers, *ahead)) + joined,
            per_pair=sum(layer.per_pair for layer in (*layers, *ahead)) - near,
            windows={text.sliding_window: near} if near else {},
        ),
        head=2.0 * text.hidden_size * text.vocab_size * (1 + mtp_layers),
        towers=config.tower_costs(),
    )


def layer_kinds(text: PretrainedConfig) -> list[LayerKind]:
    """What every decoder layer is made of."""
    count = text.num_hidden_layers
    linear = [kind == "linear_attention" for kind in getattr(text, "layer_types", None) or [""] * count]
    dense, every = set(getattr(text, "mlp_only_layers", None) or ()), getattr(text, "decoder_sparse_step", 1)
    sparse = bool(getattr(text, "num_experts", 0))
    windowed = windowed_layers(text) or [False] * count
    full = [full_heads(text) is not None and not short for short in windowed]
    return [LayerKind(linear[i], sparse and i not in dense and (i + 1) % every == 0, full[i]) for i in range(count)]


def _layer(config: FamilyConfig, kind: LayerKind) -> DecoderCost:
    text = config.text
    attention = _full_attention if kind.full else _attention
    mixing = _linear_attention(text) if kind.linear else attention(text, "output_gate" in config.traits)
    gated = "plain_shared_expert" not in config.traits
    return DecoderCost(mixing.per_token + (_experts(text, gated) if kind.sparse else _mlp(text)), mixing.per_pair)


def _attention(text: PretrainedConfig, gated: bool) -> DecoderCost:
    """Queries (twice with a gate), keys, values and the way out; scores and their product with the values."""
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    queries, keys = text.num_attention_heads * head, text.num_key_value_heads * head
    widths = queries * (3 if gated else 2) + 2 * keys
    return DecoderCost(2.0 * text.hidden_size * widths, 4.0 * queries)


def _full_attention(text: PretrainedConfig, gated: bool) -> DecoderCost:
    """The cost of a layer with `full_heads`, whose values are its keys."""
    heads = text.full_heads
    queries, keys = text.num_attention_heads * heads.width, heads.groups * heads.width
    return DecoderCost(2.0 * text.hidden_size * (queries * (3 if gated else 2) + keys), 4.0 * queries)


def _linear_attention(text: PretrainedConfig) -> DecoderCost:
    """Gated DeltaNet: projections, convolution, and the delta rule in chunks (arXiv 2412.06464, section 3.3).

    In a chunk of C tokens a head of widths K and V takes two products of C x K, the solution of a triangular system for
    K + V columns, one of C x V, and three of K x V with the state.
    """
    key, value = text.linear_key_head_dim, text.linear_value_head_dim
    keys, heads = text.linear_num_key_heads * key, text.linear_num_value_heads
    values = heads * value
    projections = 2.0 * text.hidden_size * (2 * keys + 2 * values + 2 * heads) + 2.0 * values * text.hidden_size
    convolution = 2.0 * text.linear_conv_kernel_dim * (2 * keys + values)
    rule = heads * (4.0 * CHUNK * key + CHUNK * (key + value) + 2.0 * CHUNK * value + 6.0 * key * value)
    return DecoderCost(projections + convolution + rule, 0.0)


def _mlp(text: PretrainedConfig) -> float:
    return 6.0 * text.hidden_size * text.intermediate_size


def _experts(text: PretrainedConfig, gated: bool) -> float:
    """Router, the experts of a token, and the shared one, with its gate where it has one."""
    hidden, shared = text.hidden_size, getattr(text, "shared_expert_intermediate_size", 0) or 0
    routed = text.num_experts_per_tok * 6.0 * hidden * text.moe_intermediate_size
    gate = 2.0 * hidden * (gated and bool(shared))
    return 2.0 * hidden * text.num_experts + routed + 6.0 * hidden * shared + gate
