"""The dict of a config.json: what it may hold, checked before anything is built of it, and its language model's part.

A config.json may come from anybody, and a number of it becomes a loop, a list or a tensor. Bounds lie far above all that is
published; keys mean the same in every part of a config and in every family. A key that is not named here is nobody's
count: transformers keeps it and nothing reads it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from zoo.errors import ConfigError, printable
from zoo.types import JsonMapping, JsonObject

WIDTH, HEADS, LAYERS, SIDE = 2**17, 2**12, 2**10, 2**14
EXPERTS_OF_ALL_LAYERS = 2**18  # each has names of its own; 30,000 are published
LONGEST_LIST = 2**14
TOKEN = (-1, 2**31 - 1)  # ids of tokens; -1 stands for none in some
KINDS = {dict: "an object", list: "a list", tuple: "a list", str: "a text", bool: "true or false", type(None): "null"}

WHOLE: dict[str, tuple[int, int]] = {
    name: bounds
    for bounds, names in (
        ((1, LAYERS), "num_hidden_layers depth encoder_layers decoder_sparse_step full_attention_interval"),
        ((0, LAYERS), "first_k_dense_replace num_kv_shared_layers max_window_layers"),
        ((-LAYERS, LAYERS), "accept_hidden_layer"),
        ((1, WIDTH), "hidden_size d_model out_hidden_size output_dim decoder_dim query_pre_attn_scalar"),
        ((1, WIDTH), "downsample_hidden_size projection_dim thinker_hidden_size"),
        ((0, WIDTH), "hidden_size_per_layer_input"),
        ((1, 8 * WIDTH), "intermediate_size moe_intermediate_size encoder_ffn_dim"),
        ((0, 8 * WIDTH), "shared_expert_intermediate_size"),
        ((1, HEADS), "num_attention_heads num_key_value_heads num_heads encoder_attention_heads head_dim"),
        ((1, HEADS), "num_global_key_value_heads global_head_dim linear_num_key_heads linear_num_value_heads"),
        ((1, HEADS), "linear_key_head_dim linear_value_head_dim"),
        ((1, 2**24), "vocab_size codebook_size"),
        ((0, 2**24), "vocab_size_per_layer_input"),
        ((0, 2**13), "num_experts num_local_experts n_routed_experts top_k_experts"),
        ((1, 2**13), "num_experts_per_tok"),
        ((1, 2**10), "n_group topk_group n_shared_experts num_mel_bins num_code_groups num_quantizers"),
        ((1, 2**10), "spatial_merge_size temporal_patch_size"),
        ((1, 2**6), "in_channels num_channels linear_conv_kernel_dim"),
        ((1, 2**8), "pooling_kernel_size"),
        ((0, 16), "mtp_num_hidden_layers num_nextn_predict_layers"),
        ((1, 2**31), "max_position_embeddings original_max_position_embeddings conv_chunksize"),
        ((0, 2**31), "sliding_window chunk_size_feed_forward"),
        ((1, 2**20), "position_embedding_size num_position_embeddings"),
        ((0, 2**20), "image_seq_length mm_tokens_per_image"),
        ((1, 2**16), "max_source_positions n_window n_window_infer position_id_per_seconds seconds_per_chunk"),
        ((1, 2**16), "tokens_per_second"),
        ((0, 2**16), "pretraining_tp num_labels"),
        ((1, SIDE), "window_size"),
    )
    for name in names.split()
}
REAL: dict[str, tuple[float, float]] = {
    name: bounds
    for bounds, names in (
        ((0.0, 1.0), "rms_norm_eps layer_norm_eps attention_dropout dropout activation_dropout hidden_dropout_prob"),
        ((0.0, 1.0), "projection_dropout"),
        ((0.0, 1e4), "initializer_range initializer_factor layer_scale_initial_scale"),
        ((-1e4, 1e4), "layer_scale_init_value"),
        ((2**-10, 1.0), "downsample_ratio"),
        ((1e-6, 1.0), "partial_rotary_factor"),
        ((1e-6, 1e6), "attn_logit_softcapping final_logit_softcapping routed_scaling_factor factor"),
        ((1e-6, 1e6), "attention_factor beta_fast beta_slow low_freq_factor high_freq_factor"),
        ((0.0, 1e6), "mscale mscale_all_dim"),
        ((0.0, 1e6), "router_aux_loss_coef"),
        ((1e-6, 1e15), "rope_theta"),
    )
    for name in names.split()
}
FLAGS = {
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob", "use_cache"),
    *("output_router_logits", "scale_embedding", "multimodal_projector_bias", "enable_audio_output"),
    *("mtp_use_dedicated_embeddings", "vision_use_head", "mrope_interleaved", "is_causal", "is_encoder_decoder"),
    *("output_hidden_states", "return_dict", "use_qk_norm", "use_mask_token", "use_mean_pooling"),
    *("use_absolute_position_embeddings", "truncate"),
}
TEXTS = {
    *("model_type", "hidden_act", "activation_function", "projector_hidden_act", "rope_type", "dtype"),
    *("torch_dtype", "vision_feature_select_strategy", "vision_aspect_ratio", "transformers_version", "norm_type"),
}
OBJECTS = {"text_config", "vision_config", "thinker_config"}  # parts that zoo builds
OTHER_OBJECTS = {
    *("audio_config", "talker_config", "code2wav_config", "code_predictor_config", "rope_parameters", "rope_scaling")
}
# Lists, and what their entries are.
WHOLES: dict[str, tuple[int, int]] = {
    "mrope_section": (0, HEADS), "mlp_only_layers": (-LAYERS, LAYERS), "deepstack_visual_indexes": (-LAYERS, LAYERS),
    "fullatt_block_indexes": (-LAYERS, LAYERS), "vision_feature_layer": (-LAYERS, LAYERS), "image_size": (1, SIDE),
    "patch_size": (1, 2**10), "eos_token_id": TOKEN, "upsample_rates": (1, 2**10), "upsampling_ratios": (1, 2**10),
}  # fmt: skip
EITHER = {"vision_feature_layer", "image_size", "patch_size", "eos_token_id"}  # one number, or a list of them
LISTS = {*WHOLES, "layer_types", "image_grid_pinpoints", "architectures"}
# What transformers takes and few decoders or towers here have: another architecture where it is anything else than this.
ONLY: JsonObject = {"per_layer_config": None, "is_causal": True}


def check_arch(arch: object, origin: str = "config.json") -> None:
    """ConfigError, one sentence, where an architecture has a value of another type or out of bounds.

    Args:
        arch: the dict of a config.json.
        origin: where it is from, for messages.
    """
    if not isinstance(arch, Mapping):
        raise ConfigError(f"{origin}: it holds {_kind(arch)}; wanted a JSON object")
    for where, key, value in _entries(arch):
        wanted = _wrong(key, value)
        if wanted:
            raise ConfigError(f"{origin}: {printable(where, 200)} is {_shown(value)}; wanted {wanted}")
    for part in _parts(arch):
        layers = part.get("num_hidden_layers") or 0
        experts = max(part.get(key) or 0 for key in ("num_experts", "num_local_experts", "n_routed_experts"))
        if layers * experts > EXPERTS_OF_ALL_LAYERS:
            raise ConfigError(
                f"{origin}: {layers} layers of {experts} experts are {layers * experts:,} in all; wanted at most "
                f"{EXPERTS_OF_ALL_LAYERS:,}"
            )


def refuse_unbuilt(arch: JsonMapping, built: Iterable[str] = (), origin: str = "config.json") -> None:
    """ConfigError for a key of ONLY with another value, or a tower for sound that is null, but for keys in `built`."""
    for where, key, value in _entries(arch):
        wanted = None
        if key in ONLY and value is not None and value != ONLY[key]:
            wanted = f"{_shown(ONLY[key])}: nothing else is built"
        elif key == "audio_config" and value is None:
            wanted = "an object"
        if wanted and key not in built:
            raise ConfigError(f"{origin}: {printable(where, 200)} is {_shown(value)}; wanted {wanted}")


def _parts(arch: JsonMapping) -> Iterator[JsonMapping]:
    """The config and the configs within it."""
    waiting = [arch]
    while waiting:
        part = waiting.pop()
        yield part
        waiting += [value for value in part.values() if isinstance(value, Mapping)]


def _entries(arch: JsonMapping) -> Iterator[tuple[str, str, object]]:
    """(path, key, value) of every entry, however deep."""
    waiting = [("", arch)]
    while waiting:
        prefix, part = waiting.pop()
        for key, value in part.items():
            yield f"{prefix}{key}", str(key), value
            if isinstance(value, Mapping):
                waiting.append((f"{prefix}{key}.", value))


def _wrong(key: str, value: object) -> str | None:
    """What is wanted in the place of a value; None where it is right. Whether null is, transformers says of a number."""
    if key in OBJECTS and not isinstance(value, Mapping):
        return "an object"
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) > LONGEST_LIST:
        return f"at most {LONGEST_LIST:,} entries"
    if key in OTHER_OBJECTS:
        return None if isinstance(value, Mapping) else "an object or null"
    if key in LISTS:
        return _wrong_list(key, value)
    if key in REAL:
        return _wrong_number(value, REAL[key], whole=False)
    if key in FLAGS:
        return None if isinstance(value, bool) else "true or false"
    if key in TEXTS:
        return None if isinstance(value, str) else "a text"
    bounds = WHOLE.get(key) or (TOKEN if key.endswith(("_token_id", "_token_index")) else None)
    return _wrong_number(value, bounds, whole=True) if bounds else None


def _wrong_list(key: str, value: object) -> str | None:
    """As `_wrong`, for a key of LISTS."""
    if not isinstance(value, list | tuple):
        if key in EITHER:
            return _wrong_number(value, WHOLES[key], whole=True)
        return "a list, each of its entries whole numbers" if key in WHOLES else "a list"
    if key in WHOLES:
        text = next(filter(None, (_wrong_number(entry, WHOLES[key], whole=True) for entry in value)), None)
        return text and f"a list, each of its entries {text}"
    if key != "image_grid_pinpoints":
        return None if all(isinstance(entry, str) for entry in value) else "a list of texts"
    pairs = all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value)
    sizes = (1, 2**6 * SIDE)
    if value and pairs and not any(_wrong_number(size, sizes, whole=True) for pair in value for size in pair):
        return None
    return "a list of pairs [height, width] in pixels"


def _wrong_number(value: object, bounds: tuple[float, float], *, whole: bool) -> str | None:
    kind = "a whole number" if whole else "a number"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return kind
    if not bounds[0] <= value <= bounds[1]:  # nan is in no bounds
        return f"{kind} from {bounds[0]:,} to {bounds[1]:,}"
    return None


def _kind(value: object) -> str:
    return KINDS.get(type(value), "a number")


def _shown(value: object) -> str:
    """A value as JSON has it, or the kind of a long one."""
    if isinstance(value, list | tuple | Mapping):
        return f"{_kind(value)} of {len(value)} entries"
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of over 20 digits"
    return printable(repr(value), 80)


def text_config(arch: JsonMapping) -> JsonMapping:
    """The language model's part of a Hugging Face config: where it lies differs between families."""
    thinker = arch.get("thinker_config")
    if isinstance(thinker, Mapping):
        arch = thinker
    text = arch.get("text_config")
    return text if isinstance(text, Mapping) else arch


def num_experts(arch: JsonMapping) -> int:
    """Experts of a mixture-of-experts layer; 0 for a dense model, also where its config has such a key.

    transformers has a model type of its own for each decoder with experts, "moe" in its name or "_next" at its end, and
    passes over the key in the config of a dense one.
    """
    text = text_config(arch)
    kind = str(text.get("model_type") or arch.get("model_type") or "moe")
    if "moe" not in kind and not kind.endswith("_next"):
        return 0
    names = ("num_experts", "n_routed_experts", "num_local_experts")  # the last as transformers saves some
    return next((text[name] for name in names if text.get(name)), 0)


_OF_ONE_PART = {key for key in (*WHOLE, *WHOLES) if not key.endswith("_token_id")} | {"layer_types"}
_SHOWN = 3


def refuse_misplaced(arch: object, changes: object, origin: str) -> None:
    """ConfigError for a changed key that is not in the architecture but in another part of it.

    Such as `text_config.hidden_size` where `hidden_size` stands at the top, or the reverse. Keys that no part has pass: what
    may stand in a config is not known here.

    Args:
        arch: the architecture before the change, a dict of a config.json.
        changes: keys that are set, in nested dicts.
        origin: where they are from, for the message.
    """
    if not isinstance(arch, Mapping) or not isinstance(changes, Mapping):
        return
    there, decoder = set(_paths(arch)), text_config(arch)  # whose keys are named first
    for path in _paths(changes):
        if isinstance(_at(changes, path), Mapping):
            continue
        known = next((depth for depth in range(len(path)) if path[: depth + 1] not in there), len(path))
        if known >= len(path) or not isinstance(_at(arch, path[:known]), Mapping):
            continue
        above, end, near = path[:known], path[known:], list[tuple[str, ...]]()
        if len(end) == 1 and path[-1] in _OF_ONE_PART:
            near = [other for other in there if other[:known] == above and other[-1:] == end]
        elif len(end) > 1 and end[0].endswith("_config"):
            short = above + end[1:]
            near = [other for other in there if other[-len(end) :] == end] + ([short] if short in there else [])
        if near:
            where = f"{origin}: " if origin else ""
            near.sort(key=lambda other: (_at(arch, other[:-1]) is not decoder, other))
            hints = ", ".join(f"model.arch.{'.'.join(hint)}" for hint in near[:_SHOWN])
            raise ConfigError(f"{where}{printable(f'model.arch.{".".join(path)}', 200)}: no such key; nearest: {hints}")


def _paths(values: Mapping[object, object]) -> Iterator[tuple[str, ...]]:
    """The path of every key, those of dicts included, without empty ones."""
    waiting: list[tuple[tuple[str, ...], Mapping[object, object]]] = [((), values)]
    while waiting:
        prefix, part = waiting.pop()
        for key, value in part.items():
            yield (*prefix, str(key))
            if isinstance(value, Mapping):
                waiting.append(((*prefix, str(key)), value))


def _at(values: object, path: tuple[str, ...]) -> object:
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values
