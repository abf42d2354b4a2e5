"""What is refused of a transformers config: settings that would be another model than the one that is built, in one sentence."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

from zoo.errors import UserError, printable
from zoo.nn.decoder.config import activation, full_heads, head_width, limits_groups, normalised
from zoo.nn.decoder.mlp import ACTIVATIONS
from zoo.types import JsonMapping

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Numbers that a kind of rotary embedding needs, beside rope_theta.
SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "proportional": (),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
DROPOUTS = ("attention_dropout", "dropout", "activation_dropout", "hidden_dropout_prob", "projection_dropout")


def check_decoder(config: Any) -> None:
    """UserError for a decoder's settings that would change the arithmetic and are not built, or that don't go together.

    `config` is a zoo.nn.family.FamilyConfig.
    """
    text, where = config.text, config.text_prefix
    _refuse_unbuilt(config)
    heads, full = text.num_attention_heads, full_heads(text)
    key_heads = {"num_key_value_heads": text.num_key_value_heads}
    if full is not None:
        key_heads["num_global_key_value_heads"] = full.groups
    for key, groups in key_heads.items():
        if heads % groups:
            raise UserError(f"{where}{key} is {groups}; wanted a divisor of num_attention_heads {heads}")
    _check_layers(config)
    _check_experts(text, where)
    if "sigmoid_routing" in config.traits:
        _check_sigmoid_routing(text, where)
    _check_rotary(config)


def _refuse_unbuilt(config: Any) -> None:
    text, where = config.text, config.text_prefix
    if activation(text) not in ACTIVATIONS:
        key = "hidden_activation" if hasattr(text, "hidden_activation") else "hidden_act"
        raise UserError(f"{where}{key} is {activation(text)!r}; wanted {' or '.join(ACTIVATIONS)}")
    if getattr(text, "mlp_bias", False):
        raise UserError(f"{where}mlp_bias is true; this decoder's MLPs have no biases")
    both_ways = getattr(text, "use_bidirectional_attention", None)
    if both_ways and (both_ways != "vision" or "two_way_in_windows" not in config.traits):
        raise UserError(
            f"{where}use_bidirectional_attention is {both_ways!r}: an encoder of text, which has no next token to learn; "
            "wanted false"
        )
    if getattr(text, "mtp_use_dedicated_embeddings", False):
        raise UserError(f"{where}mtp_use_dedicated_embeddings is true; MTP layers here share the decoder's embedding")
    # Qwen3.8 states the gate; transformers' models read `hidden_act` in its place.
    gate = getattr(getattr(config.root, "text_config", config.root), "output_gate_type", None)
    if gate not in (None, "swish", "silu"):
        raise UserError(f"{where}output_gate_type is {gate!r}; linear attention here gates with SiLU (swish)")
    _refuse_dropout(where, text)


def _refuse_dropout(where: str, part: PretrainedConfig) -> None:
    for key in DROPOUTS:
        if getattr(part, key, 0):
            raise UserError(
                f"{where}{key} is {getattr(part, key)}; there is no dropout here but in adapters: set it to 0"
            )


def _check_layers(config: Any) -> None:
    text, where = config.text, config.text_prefix
    kinds = list(getattr(text, "layer_types", None) or [])
    built = {"full_attention", *(("linear_attention",) if hasattr(text, "linear_num_key_heads") else ())}
    built |= {"sliding_attention"} if hasattr(text, "sliding_window") else set()
    for kind in sorted(set(kinds) - built):
        raise UserError(f"{where}layer_types has {kind!r}; wanted {' or '.join(sorted(built))}")
    if kinds and len(kinds) != text.num_hidden_layers:
        raise UserError(
            f"{where}layer_types has {len(kinds)} entries; wanted one for each of num_hidden_layers "
            f"{text.num_hidden_layers}"
        )
    if "sliding_attention" in kinds and not text.sliding_window:
        raise UserError(f"{where}sliding_window is {text.sliding_window}; wanted 1 or more tokens")
    if "linear_attention" in kinds and text.linear_num_value_heads % text.linear_num_key_heads:
        raise UserError(
            f"{where}linear_num_value_heads is {text.linear_num_value_heads}; wanted a multiple of "
            f"linear_num_key_heads {text.linear_num_key_heads}"
        )


def _check_experts(text: PretrainedConfig, where: str) -> None:
    experts = getattr(text, "num_experts", None)
    if experts is None:
        return
    if not experts and not hasattr(text, "intermediate_size"):
        raise UserError(f"{where}num_experts is 0; wanted 2 or more, as these layers have nothing else")
    if experts and text.num_experts_per_tok > experts:
        raise UserError(
            f"{where}num_experts_per_tok is {text.num_experts_per_tok}; wanted at most num_experts {experts}"
        )
    if experts and text.num_experts_per_tok == 1 and normalised(text):
        raise UserError(
            f"{where}num_experts_per_tok is 1 and the weights of a token's experts sum to one: the router would "
            "get no gradient; use 2 or more experts a token, or norm_topk_prob=false where the family has that key"
        )
    if getattr(text, "shared_expert_intermediate_size", None) == 0:
        raise UserError(f"{where}shared_expert_intermediate_size is 0; wanted the width of the shared expert")


def _check_sigmoid_routing(text: PretrainedConfig, where: str) -> None:
    if text.num_experts_per_tok > 1 and not normalised(text):
        raise UserError(
            f"{where}norm_topk_prob is false; the sigmoid scores of a token's experts are divided by their sum here, "
            "as in the published models: set it to true"
        )
    experts, groups, chosen = text.num_experts, text.n_group, text.topk_group
    if chosen > groups or experts % groups or experts // groups < 2:
        raise UserError(
            f"{where}n_group is {groups} and topk_group {chosen}; wanted a divisor of the {experts} experts that "
            "leaves two or more to a group, and no more groups to a token than there are"
        )
    if not limits_groups(text):
        return
    if text.num_experts_per_tok > chosen * experts // groups:
        raise UserError(
            f"{where}topk_group is {chosen}: these groups have {chosen * experts // groups} experts, fewer than "
            f"num_experts_per_tok {text.num_experts_per_tok}"
        )
    # megatron-core scores a group by its best num_experts_per_tok // topk_group experts, transformers by its best two.
    if text.num_experts_per_tok // chosen != 2:
        raise UserError(
            f"{where}num_experts_per_tok is {text.num_experts_per_tok} and topk_group {chosen}; this router takes two "
            "experts of each group of a token, or all groups: set topk_group to n_group or to half of num_experts_per_tok"
        )


def _check_rotary(config: Any) -> None:
    text, rope, where = config.text, config.text.rope_parameters, f"{config.text_prefix}rope_parameters"
    full, head = full_heads(text), head_width(text)
    scaled = ("default", "linear", "yarn", "llama3")
    if config.sliding:
        for kind, width in (("full_attention", full.width if full else head), ("sliding_attention", head)):
            if not isinstance(rope.get(kind), dict):
                raise UserError(f"{where}.{kind} is missing; wanted the parameters of such layers")
            _check_angles(f"{where}.{kind}", rope[kind], (*scaled, *config.further_angles), width, partial=False)
    elif any(isinstance(value, dict) for value in rope.values()):
        raise UserError(
            f"{where} has parameters for each kind of layer; this decoder has one rotary embedding for all of them"
        )
    else:
        # Dynamic is the default up to max_position_embeddings, which `transformer_config` holds packing.budget to.
        plain = ("dynamic",) if config.mrope_section is None else ()
        _check_angles(where, rope, (*scaled, *plain), head, config.partial_rotary)
    if "mrope_section" in rope and not isinstance(rope["mrope_section"], list | tuple):
        raise UserError(f"{where}.mrope_section is null; wanted a list of 3 numbers")
    try:
        shapes = (config.rotary, config.local_rotary)
    except ArithmeticError as error:
        raise UserError(
            f"{where}: transformers can't compute the frequencies ({error}); correct its numbers"
        ) from error
    for shape in shapes:
        if shape is not None and shape.sections is not None:
            _check_sections(where, shape.sections, len(shape.frequencies), shape.interleaved)


def _check_angles(where: str, rope: JsonMapping, built: tuple[str, ...], head: int, partial: bool) -> None:
    """Check the rotary parameters of heads with `head` channels; UserError where no decoder can be built from them.

    `partial`: transformers rotates the share of the channels that `partial_rotary_factor` names, and not all of them.
    """
    kind = rope.get("rope_type", "default")
    if kind not in built:
        raise UserError(f"{where}.rope_type is {kind!r}; this decoder has {', '.join(map(repr, built))} only")
    for name in ("rope_theta", *SCALINGS[kind]):
        if rope.get(name) is None:
            raise UserError(f"{where}.{name} is {'null' if name in rope else 'missing'}; wanted a number")
    if null := [name for name in ("partial_rotary_factor", "factor") if rope.get(name, 1.0) is None]:
        raise UserError(f"{where}.{null[0]} is null; wanted a number")
    part = float(rope.get("partial_rotary_factor", 1.0))
    if kind not in ("default", "proportional") and not partial and part != 1.0:
        raise UserError(f"{where}.partial_rotary_factor is {part}; this decoder rotates whole heads: leave it out")
    rotated = int(head * part) if partial else head
    if rotated < 2 or rotated % 2:
        raise UserError(
            f"{rotated} of the {head} channels of a head would be rotated; wanted an even number: change head_dim or "
            f"partial_rotary_factor of {where}"
        )


def _check_sections(where: str, sections: list[int], frequencies: int, interleaved: bool) -> None:
    """Interleaved, frequency 3k + 1 is height's and 3k + 2 width's for as many k as its section says."""
    fits = len(sections) == 3 and sum(sections) == frequencies
    beyond = (axis + 3 * (sections[axis] - 1) >= frequencies for axis in (1, 2) if sections[axis]) if fits else ()
    if not fits or (interleaved and any(beyond)):
        raise UserError(
            f"{where}.mrope_section is {printable(str(sections), 100)}; wanted three numbers that sum to {frequencies}, "
            "half of the rotated channels of a head"
            + (", of which the last two are a third of it at most" if interleaved else "")
        )


def check_sides(config: Any) -> None:
    """UserError for a pair (height, width) in the place of a number that a tower of transformers computes with."""
    for key in ("image_size", "patch_size"):
        value = getattr(config.vision, key, None)
        if isinstance(value, list | tuple) and not isinstance(getattr(type(config.vision), key), tuple):
            raise UserError(f"vision_config.{key} is {list(value)}; wanted one number of pixels")


def check_towers(config: Any) -> None:
    """UserError for a tower that transformers can't build, whose outputs don't fit the decoder, or that has dropout."""
    from transformers.activations import ACT2FN

    width = config.text.hidden_size
    for name, outputs in (("vision_config", "out_hidden_size"), ("audio_config", "output_dim")):
        part = getattr(config.root, name, None)
        if part is None:
            continue
        _refuse_dropout(f"{name}.", part)
        rope = getattr(part, "rope_parameters", None) or {}
        kind = rope.get("rope_type", "axial")
        if kind not in ("axial", "default"):
            raise UserError(f"{name}.rope_parameters.rope_type is {kind!r}; transformers' towers have 'axial' only")
        if any(isinstance(value, dict) for value in rope.values()):
            raise UserError(f"{name}.rope_parameters has parameters for each kind of layer; wanted one set")
        if rope and rope.get("rope_theta") is None:
            raise UserError(f"{name}.rope_parameters.rope_theta is null; wanted a number")
        output_width = getattr(part, outputs, width)
        if output_width != width:
            raise UserError(f"{name}.{outputs} is {output_width}; wanted text_config.hidden_size {width}")
        if part.hidden_size % part.num_attention_heads:
            raise UserError(
                f"{name}: a width of {part.hidden_size} can't be shared by {part.num_attention_heads} attention heads; "
                "wanted a divisor"
            )
        for key in ("hidden_act", "hidden_activation", "activation_function"):
            _check_activation(f"{name}.{key}", getattr(part, key, None), ACT2FN)
    _check_activation("projector_hidden_act", getattr(config.hf, "projector_hidden_act", None), ACT2FN)


def _check_activation(key: str, value: str | None, known: Container[str]) -> None:
    if value is not None and value not in known:
        raise UserError(f"{key} is {value!r}; transformers has no such function")
