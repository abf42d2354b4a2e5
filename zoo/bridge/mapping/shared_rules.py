"""Rules that decoders share: a layer of full attention, its dense MLP or its experts, embedding and head.

Each function gives the rules of one part: `zoo` and `hf` are the prefixes of its names on either side, with `{layer}`
where there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from zoo.bridge.mapping.rules import Layout, PaddedRows, Rule, Shard, per_expert_down, per_expert_gate_up, rule
from zoo.bridge.mapping.table import SCORE
from zoo.bridge.mapping.transforms import QKV, Dims, GateUp, Transform, Transposed
from zoo.types import JsonMapping, JsonObject

LAYERS = "decoder.layers.{layer}"  # zoo's names of a decoder's layers

type Stored = Callable[[str], tuple[Layout, Layout]]
"""How experts of a prefix are stored: `stacks`, `transposed_stacks` or `singles`."""


def decoder(
    hf: str, *stored: Stored, head: str = "lm_head.weight", score: str = SCORE, sandwich: bool = False
) -> tuple[Rule, ...]:
    """A decoder of full attention: its ends, and layers that are dense or have experts, `stored` so."""
    layers, mlps = f"{hf}.layers.{{layer}}", (f"{LAYERS}.mlp", f"{hf}.layers.{{layer}}.mlp")
    return (
        *decoder_ends(hf, head, score),
        *attention_layer(LAYERS, layers, sandwich=sandwich),
        *dense_mlp(*mlps),
        *(routed_experts(*mlps, *stored) if stored else ()),
    )


def decoder_ends(hf: str, head: str, score: str = SCORE) -> tuple[Rule, ...]:
    """Embedding, final norm, and the head of that name, which a tied model does not have; a reward model has `score` in its place."""
    embedding = f"{hf}.embed_tokens.weight"
    return (
        rule("embedding.word_embeddings.weight", embedding, shard=vocabulary),
        rule("decoder.final_layernorm.weight", f"{hf}.norm.weight"),
        Rule("output_layer.weight", (Layout((head,)),), vocabulary, tied_to=embedding),
        rule(SCORE, score),
    )


def vocabulary(dims: Dims, part: str = "") -> Shard | PaddedRows:
    """How ranks share the rows of embedding and head, of a further decoder where `part` names one."""
    dims = dims.parts[part] if part else dims
    return PaddedRows(dims.vocabulary) if dims.vocabulary else "tp0"


def attention_layer(zoo: str, hf: str, qkv: Transform | None = None, *, sandwich: bool = False) -> tuple[Rule, ...]:
    """A layer's norms and its attention with QK norm and biases; `qkv` joins queries, keys and values, by default ungated.

    `sandwich`: with norms behind attention and MLP too, as Gemma names the four.
    """
    qkv, parts = qkv or QKV(), [f"{hf}.self_attn.{part}_proj" for part in "qkv"]
    attention, norms = f"{zoo}.self_attention", {"pre_mlp_layernorm": "post_attention_layernorm"}
    if sandwich:
        norms = {"post_self_attn_layernorm": "post_attention_layernorm"}
        norms |= {f"{side}_mlp_layernorm": f"{side}_feedforward_layernorm" for side in ("pre", "post")}
    return (
        rule(f"{zoo}.input_layernorm.weight", f"{hf}.input_layernorm.weight"),
        *(
            rule(f"{attention}.linear_qkv.{kind}", *(f"{part}.{kind}" for part in parts), transform=qkv, shard="tp0")
            for kind in ("weight", "bias")
        ),
        rule(f"{attention}.linear_proj.weight", f"{hf}.self_attn.o_proj.weight", shard="tp1"),
        rule(f"{attention}.linear_proj.bias", f"{hf}.self_attn.o_proj.bias"),
        rule(f"{attention}.q_layernorm.weight", f"{hf}.self_attn.q_norm.weight"),
        rule(f"{attention}.k_layernorm.weight", f"{hf}.self_attn.k_norm.weight"),
        *(rule(f"{zoo}.{ours}.weight", f"{hf}.{theirs}.weight") for ours, theirs in norms.items()),
    )


def dense_mlp(zoo: str, hf: str) -> tuple[Rule, ...]:
    """A gated MLP."""
    gate_up = (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight")
    return (
        rule(f"{zoo}.linear_fc1.weight", *gate_up, transform=GateUp(), shard="tp0-gateup"),
        rule(f"{zoo}.linear_fc2.weight", f"{hf}.down_proj.weight", shard="tp1"),
    )


def routed_experts(zoo: str, hf: str, *stored: Stored, keeps_layout: bool = False) -> tuple[Rule, ...]:
    """A router and its experts, read as any of `stored`, written as the first.

    With `keeps_layout` they are written as the source of an export has them.
    """
    gate_up, down = zip(*(layouts(f"{hf}.experts") for layouts in stored), strict=True)
    return (
        rule(f"{zoo}.router.weight", f"{hf}.gate.weight"),
        Rule(f"{zoo}.experts.weight1", gate_up, shard="expert1", keeps_layout=keeps_layout),
        Rule(f"{zoo}.experts.weight2", down, shard="expert2", keeps_layout=keeps_layout),
    )


def stacks(experts: str) -> tuple[Layout, Layout]:
    """`<experts>.gate_up_proj` [E, 2I, H] and `<experts>.down_proj` [E, H, I], as zoo has them."""
    return Layout((f"{experts}.gate_up_proj",)), Layout((f"{experts}.down_proj",))


def transposed_stacks(experts: str) -> tuple[Layout, Layout]:
    """`<experts>.gate_up_proj` [E, H, 2I] and `<experts>.down_proj` [E, I, H]."""
    gate_up, down = (layout.patterns for layout in stacks(experts))
    return Layout(gate_up, Transposed()), Layout(down, Transposed())


def singles(experts: str) -> tuple[Layout, Layout]:
    """Three tensors an expert."""
    return per_expert_gate_up(experts), per_expert_down(experts)


def fp8_linears(*layers: str, stacked: bool = False) -> tuple[str, ...]:
    """Patterns of the matrices in layers of these prefixes that -FP8 folders have in FP8: those of attention, MLPs and (`stacked`) experts.

    Routers, the gate of a shared expert, and the small projections of linear attention stay in bf16 there.
    """
    attention = [f"self_attn.{part}_proj" for part in "qkvo"]
    linear = [f"linear_attn.{part}" for part in ("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj")]
    mlps = [
        f"mlp.{mlp}{part}_proj"
        for mlp in ("", "shared_expert.", "experts.{expert}.")
        for part in ("gate", "up", "down")
    ]
    matrices = [f"{matrix}.weight" for matrix in (*attention, *linear, *mlps)]
    matrices += ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if stacked else []
    return tuple(f"{layer}.{matrix}" for layer in layers for matrix in matrices)


def published_experts(config: JsonObject, names: Collection[str] = ()) -> JsonObject:
    """A bridge's `export_config`: the decoder's number of experts under its published key, which transformers >= 5 renames as it saves."""
    if "text_config" in config:
        return {**config, "text_config": published_experts(config["text_config"])}
    if "num_local_experts" not in config:
        return config
    text = dict(config)
    return {"num_experts": text.pop("num_local_experts"), **text}


def swapped(prefixes: Mapping[str, str]) -> dict[str, str]:
    """Published prefixes by the names that they have in memory, of those by published ones."""
    return {there: published for published, there in prefixes.items()}


# Names as transformers saves a thinker by itself -> those of the whole model.
THINKER_ALONE = {name: f"thinker.{name}" for name in ("model.", "lm_head.", "visual.", "audio_tower.")}


def whole_config(kind: str, speaking: str, silent: str) -> Callable[[JsonObject, Collection[str]], JsonObject]:
    """A bridge's `export_config`: the whole model's config.json, of model_type `kind`.

    A thinker's own config is wrapped, as ours are the published names, which begin with `thinker.`; the special token ids
    outside the thinker then have HF's defaults. `speaking` and `silent` are the classes of `architectures` with a talker in the
    weights and without one, when HF must not build one either (enable_audio_output); vLLM knows the former alone, and takes the
    first that it knows.
    """

    def export_config(config: JsonObject, names: Collection[str]) -> JsonObject:
        if config.get("model_type") == f"{kind}_thinker":
            thinker = {key: value for key, value in config.items() if key != "architectures"}
            config = {"model_type": kind, "thinker_config": thinker}
        speaks = any(name.startswith("talker.") for name in names)
        return {
            **config,
            "architectures": [speaking] if speaks else list(dict.fromkeys([silent, speaking])),
            "enable_audio_output": speaks,
        }

    return export_config


def module_names(thinker: str) -> Callable[[JsonMapping], Mapping[str, str]]:
    """A bridge's `module_names`: a thinker by itself, of model_type `thinker` or of such a class, has no name."""
    return lambda config: {"thinker.": ""} if _is_thinker(config, thinker) else {}


def _is_thinker(config: JsonMapping, thinker: str) -> bool:
    """Whether transformers builds a thinker alone, as it does of a whole model's folder without a talker (`whole_config`)."""
    return config.get("model_type") == thinker or "Thinker" in str(config.get("architectures"))


def renamed_modules(thinker: str) -> Callable[[JsonMapping], Mapping[str, str]]:
    """A bridge's `renamed_modules`: transformers 5.21 put a thinker's decoder and towers into one module; see `module_names`."""
    moved = {"model.": "model.language_model."} | {part: f"model.{part}" for part in ("visual.", "audio_tower.")}

    def renamed(config: JsonMapping) -> Mapping[str, str]:
        root = "" if _is_thinker(config, thinker) else "thinker."
        return {f"{root}{former}": f"{root}{later}" for former, later in moved.items()}

    return renamed
