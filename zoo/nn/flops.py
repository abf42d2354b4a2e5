"""FLOPs of an architecture, read from its config, as `zoo.packing.cost` counts them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from zoo.config.derived import trains_thinker
from zoo.nn.decoder.config import full_heads, head_width, windowed_layers
from zoo.nn.family import FamilyConfig, SpeakingConfig, TalkerConfig
from zoo.nn.graphs.row import CHUNK
from zoo.packing.cost import DecoderCost, LayerKind, ModelCost, TalkerCost

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from zoo.config.schema import Recipe


def model_cost(config: FamilyConfig, recipe: Recipe | None = None) -> ModelCost:
    """What a sample costs a model of that config as the recipe trains it: with multi-token prediction, a talker, or neither (None)."""
    text = config.text
    kinds = layer_kinds(text)
    layers = [_layer(text, config.traits, kind) for kind in kinds]
    mtp_layers, talker = 0 if recipe is None else config.mtp_layers(recipe), None
    if recipe is not None and recipe.train.speech_loss and isinstance(config, SpeakingConfig) and config.talker:
        talker = config.talker
        if not trains_thinker(recipe):  # which ends where the talker reads it
            return ModelCost(_stack(text, layers[: config.accepted]), 0.0, config.tower_costs(), _talker(talker))
    # Multi-token prediction: a projection of two widths to one, and a layer that attends and is like the last.
    ahead = [_layer(text, config.traits, LayerKind(False, kinds[-1].sparse))] * mtp_layers
    joined = 4.0 * text.hidden_size**2 * mtp_layers
    headless = recipe is not None and recipe.train.headless
    return ModelCost(
        decoder=_stack(text, layers, ahead, joined),
        head=0.0 if headless else 2.0 * text.hidden_size * text.vocab_size * (1 + mtp_layers),
        towers=config.tower_costs(),
        talker=None if talker is None else _talker(talker),
    )


def _stack(
    text: PretrainedConfig, layers: Sequence[DecoderCost], ahead: Sequence[DecoderCost] = (), per_token: float = 0.0
) -> DecoderCost:
    """The cost of a decoder's first layers, of those `ahead`, which have no windows, and of so many FLOPs a token."""
    windowed = windowed_layers(text)[: len(layers)]
    near = sum(layer.per_pair for layer, short in zip(layers, windowed, strict=True) if short)
    return DecoderCost(
        per_token=sum(layer.per_token for layer in (*layers, *ahead)) + per_token,
        per_pair=sum(layer.per_pair for layer in (*layers, *ahead)) - near,
        windows={text.sliding_window: near} if near else {},
    )


def _talker(config: TalkerConfig) -> TalkerCost:
    """A talker's: of the residual codes a dense decoder over each frame by itself, whose codes have a head each but for the first."""
    text, predictor = config.text, config.residual
    layers = [_layer(text, config.traits, kind) for kind in layer_kinds(text)]
    per_frame = 2.0 * text.hidden_size * text.vocab_size
    if predictor is not None:
        length = config.codebooks
        of_frame = [_layer(predictor, (), kind) for kind in layer_kinds(predictor)]
        per_frame += _stack(predictor, of_frame).flops(length)
        per_frame += 2.0 * predictor.hidden_size * predictor.vocab_size * (length - 1)
    decoder = _stack(text, layers, per_token=2.0 * config.projection.weights)
    return TalkerCost(decoder, per_frame, config.opening, config.hertz)


def layer_kinds(text: PretrainedConfig) -> list[LayerKind]:
    """What every decoder layer is made of."""
    count = text.num_hidden_layers
    linear = [kind == "linear_attention" for kind in getattr(text, "layer_types", None) or [""] * count]
    dense, every = set(getattr(text, "mlp_only_layers", None) or ()), getattr(text, "decoder_sparse_step", 1)
    sparse = bool(getattr(text, "num_experts", 0))
    full = [full_heads(text) is not None and not short for short in windowed_layers(text)]
    return [LayerKind(linear[i], sparse and i not in dense and (i + 1) % every == 0, full[i]) for i in range(count)]


def _layer(text: PretrainedConfig, traits: Collection[str], kind: LayerKind) -> DecoderCost:
    attention = _full_attention if kind.full else _attention
    mixing = _linear_attention(text) if kind.linear else attention(text, "output_gate" in traits)
    gated = "plain_shared_expert" not in traits
    return DecoderCost(mixing.per_token + (_experts(text, gated) if kind.sparse else _mlp(text)), mixing.per_pair)


def _attention(text: PretrainedConfig, gated: bool) -> DecoderCost:
    """Queries (twice with a gate), keys, values and the way out; scores and their product with the values."""
    queries, keys = (heads * head_width(text) for heads in (text.num_attention_heads, text.num_key_value_heads))
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
