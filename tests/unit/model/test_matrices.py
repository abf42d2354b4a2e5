"""Which weights Muon updates in each family, and which matrices a fused parameter holds."""

import re
from collections.abc import Iterable

import pytest
import torch
from support.tiny import RECIPES

from zoo.bridge import Dims
from zoo.bridge.parallel import ShardInfo, cut
from zoo.config.compose import load_recipe
from zoo.model.matrices import is_matrix, matrices_of
from zoo.model.meta_model import MetaModel, build_meta_model
from zoo.registry import get_family

ATTENTION = {"linear_qkv": 3, "linear_proj": 1}
DENSE = {"mlp.linear_fc1": 2, "mlp.linear_fc2": 1}
EXPERTS = {"mlp.experts.weight1": 8, "mlp.experts.weight2": 4}  # four experts
SHARED = {"mlp.shared_experts.linear_fc1": 2, "mlp.shared_experts.linear_fc2": 1}
DELTA = {"in_proj": 4, "out_proj": 1}  # queries, keys and values together, gates, betas, alphas
BLOCK = {"attn.qkv": 1, "attn.proj": 1, "mlp.linear_fc1": 1, "mlp.linear_fc2": 1}
MERGER = {"merger.linear_fc1": 1, "merger.linear_fc2": 1}
SEPARATE = {f"self_attn.{part}_proj": 1 for part in ("q", "k", "v", "out")}
CLIP = {f"vision.encoder.layers.N.{name}": 1 for name in (*SEPARATE, "mlp.fc1", "mlp.fc2")}
LLAVA = {**CLIP, "projector.linear_1": 1, "projector.linear_2": 1}

VIT = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.projection_layer", "mlp.fc1", "mlp.fc2")


def _layer(prefix: str, *parts: dict[str, int]) -> dict[str, int]:
    named = {name: count for part in parts for name, count in part.items()}
    inner = {name: "" if "mlp" in name else "self_attention." for name in named}
    return {f"{prefix}.layers.N.{inner[name]}{name}": count for name, count in named.items()}


def _qwen35(*mlp: dict[str, int]) -> dict[str, int]:
    return {
        **{f"vision.blocks.N.{name}": count for name, count in BLOCK.items()},
        **{f"vision.{name}": 1 for name in MERGER},
        **_qwen35_text(*mlp),
    }


def _qwen35_text(*mlp: dict[str, int]) -> dict[str, int]:
    return {
        **_layer("decoder", ATTENTION, DELTA, *mlp),
        **_layer("multi_token", ATTENTION, *mlp),
        "multi_token.eh_proj": 1,
    }


def _qwen3_vl(mlp: dict[str, int]) -> dict[str, int]:
    deep = {f"vision.deepstack_merger_list.N.{name.removeprefix('merger.')}": 1 for name in MERGER}
    vision = {f"vision.blocks.N.{name}": 1 for name in BLOCK} | {f"vision.{name}": 1 for name in MERGER}
    return {**vision, **deep, **_layer("decoder", ATTENTION, mlp)}


def _ones(prefix: str, names: str | Iterable[str] = "") -> dict[str, int]:
    return {f"{prefix}{name}": 1 for name in (names.split() if isinstance(names, str) else names)}


AUDIO = _ones("audio.layers.N.", (*SEPARATE, "fc1", "fc2"))
OMNI = {
    **_ones("vision.blocks.N.", BLOCK),
    **_ones("", "vision.merger.mlp.N vision.merger_list.N.mlp.N audio.conv_out audio.proj1 audio.proj2"),
    **AUDIO,
    **_layer("decoder", ATTENTION, EXPERTS),
}
GATED = ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
QWEN25 = _ones("vision.blocks.N.", GATED) | {"vision.merger.mlp.N": 1} | _layer("decoder", ATTENTION, DENSE)
QWEN25_OMNI = {
    **_ones("vision.blocks.N.", (*(f"attn.{part}" for part in "qkv"), *GATED[1:])),
    **_ones("", "vision.merger.mlp.N audio.proj audio.audio_bos_eos_token"),  # the last is not trained
    **AUDIO,
    **_layer("decoder", ATTENTION, DENSE),
}
TALKER = {
    **_layer("talker.decoder", ATTENTION, EXPERTS, SHARED),
    **_ones(
        "talker.",
        "text_projection.linear_fc1 text_projection.linear_fc2 hidden_projection.linear_fc1 hidden_projection.linear_fc2",
    ),
    **_layer("talker.code_predictor.decoder", ATTENTION, DENSE),  # whose heads are AdamW's, as every head
}
TALKER25 = {**_layer("talker.decoder", ATTENTION, DENSE), "talker.thinker_to_talker_proj": 1}
GEMMA3 = {**CLIP, "projector.mm_input_projection_weight": 1, **_layer("decoder", ATTENTION, DENSE)}
GEMMA4 = {
    **{f"vision.encoder.layers.N.self_attn.{part}_proj.linear": 1 for part in "qkvo"},
    **{f"vision.encoder.layers.N.mlp.{part}_proj.linear": 1 for part in ("gate", "up", "down")},
    **_layer("decoder", ATTENTION, {"linear_qk": 2}, DENSE),
}
GLM = {
    **_ones("vision.blocks.N.", GATED),
    **_ones("vision.merger.", "gate_proj up_proj down_proj proj"),
    **_layer("decoder", ATTENTION, EXPERTS, DENSE, SHARED),
}
WANTED = {  # parameter -> its matrices
    "gemma3_sft": GEMMA3,
    "gemma4_sft": GEMMA4,
    "gemma3_text_sft": _layer("decoder", ATTENTION, DENSE),
    "qwen25_vl_sft": QWEN25,
    "qwen3_asr_sft": {
        **_ones("", "audio.conv_out projector.linear_1 projector.linear_2"),
        **AUDIO,
        **_layer("decoder", ATTENTION, DENSE),
    },
    "qwen25_omni_sft": QWEN25_OMNI,
    "glm45v_sft": GLM,
    "qwen3_vl_sft": _qwen3_vl(DENSE),
    "qwen3_vl_moe_sft": _qwen3_vl(EXPERTS),
    "qwen35_vl_sft": _qwen35(DENSE),
    "qwen35_vl_moe_sft": _qwen35(EXPERTS, SHARED),
    "qwen3_omni_sft": OMNI,
    "qwen3_sft": _layer("decoder", ATTENTION, DENSE),
    "qwen3_moe_sft": _layer("decoder", ATTENTION, EXPERTS),
    "qwen35_text_sft": _qwen35_text(DENSE),
    "qwen35_text_moe_sft": _qwen35_text(EXPERTS, SHARED),
    "qwen3_next_sft": {
        **_layer("decoder", ATTENTION, DELTA | {"in_proj": 2}, EXPERTS, SHARED),
        **_layer("multi_token", ATTENTION, EXPERTS, SHARED),
        "multi_token.eh_proj": 1,
    },
    "internvl_sft": {
        **_ones("vision.encoder.layer.N.", VIT),
        **_ones("projector.", "linear_1 linear_2"),
        **_layer("decoder", ATTENTION, DENSE),
    },
    "llava_sft": {**LLAVA, **_layer("decoder", ATTENTION, DENSE)},
    "llava_onevision_sft": {**LLAVA, **_layer("decoder", ATTENTION, DENSE)},
}


FAST = ("qwen3_vl_sft", "qwen35_vl_moe_sft", "qwen3_omni_sft", "llava_onevision_sft")


@pytest.mark.parametrize(
    ("recipe", "size"),
    [pytest.param(*one, id=one[0], marks=[] if one[0] in FAST else [pytest.mark.slow]) for one in RECIPES],
)
def test_matrices_of_a_family(recipe: str, size: str) -> None:
    """The rest is AdamW's: everything of one dimension or of four, embeddings, heads, routers and gates of one row."""
    assert (
        matrices(build_meta_model(load_recipe(recipe, [f"size={size}", "hardware=cpu"]).model.arch)) == WANTED[recipe]
    )


@pytest.mark.parametrize(("family", "wanted"), [("qwen3_omni", TALKER), ("qwen25_omni", TALKER25)])
def test_matrices_of_a_talker(family: str, wanted: dict[str, int]) -> None:
    arch = load_recipe(f"{family}_talker_sft", ["size=tiny", "hardware=cpu"]).model.arch
    found = matrices(build_meta_model(arch, ["talker.codec_head.weight"]))
    assert {name: count for name, count in found.items() if name.startswith("talker.")} == wanted


def matrices(model: MetaModel) -> dict[str, int]:
    """Those of each parameter, by names whose numbers are N."""
    found = {}
    for name, parameter in model.parameters.items():
        if is_matrix(name, parameter):
            shapes = list(matrices_of(name, parameter, model.bridge, model.dims, ShardInfo()).shapes())
            assert sum(m * n for m, n in shapes) == parameter.numel()
            found[re.sub(r"\.\d+(?=\.)", ".N", name).removesuffix(".weight")] = len(shapes)
    return found


DIMS = Dims(heads=8, kv_heads=4, head_dim=2, experts=4, linear_keys=8, linear_values=12, linear_value_heads=4)
CUT = [
    ("decoder.layers.0.self_attention.linear_qkv.weight", (48, 6)),
    ("decoder.layers.0.self_attention.linear_proj.weight", (6, 16)),
    ("decoder.layers.0.self_attention.in_proj.weight", (48, 6)),
    ("decoder.layers.0.mlp.linear_fc1.weight", (16, 6)),
    ("decoder.layers.0.mlp.linear_fc2.weight", (6, 8)),
    ("decoder.layers.0.mlp.experts.weight1", (4, 16, 6)),
    ("decoder.layers.0.mlp.experts.weight2", (4, 6, 8)),
    ("vision.merger.linear_fc1.weight", (4, 6)),
]


@pytest.mark.parametrize(("name", "shape"), CUT)
@pytest.mark.parametrize("size", [2, 4])
def test_matrices_of_ranks_are_parts_of_the_whole_ones(name: str, shape: tuple[int, ...], size: int) -> None:
    """Each rank's rows, or columns, of every matrix, found by what the bridge cuts of a tensor of places."""
    bridge = get_family("qwen35_vl").load("bridge")
    rule = bridge.publish([name])[name].rule
    places = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    alone = matrices_of(name, places, bridge, DIMS, ShardInfo())
    wanted = [_taken(places, runs) for runs in alone.rows[0]]
    found: list[list[torch.Tensor]] = [[] for _ in wanted]
    for rank in range(size):
        info = ShardInfo(tp_rank=rank, tp_size=size, etp_rank=rank, etp_size=size)
        shard = rule.shard_for(DIMS)
        mine = torch.stack([cut(one, shard, info) for one in places]) if rule.stacked else cut(places, shard, info)
        matrices = matrices_of(name, mine, bridge, DIMS, info)
        assert list(matrices.shapes()) == list(alone.shapes())
        if matrices.axis is None:
            torch.testing.assert_close(mine, places, rtol=0, atol=0)
            return
        for number, runs in enumerate(matrices.rows[rank]):
            found[number].append(_taken(mine, runs))
    for parts, one in zip(found, wanted, strict=True):
        joined = torch.cat(parts, dim=matrices.dim)
        assert joined.shape == one.shape
        torch.testing.assert_close(joined.flatten().sort()[0], one.flatten().sort()[0], rtol=0, atol=0)
        # Rows may come in another order, columns not; and a row is a row of the matrix.
        assert {tuple(row.tolist()) for row in joined} == {tuple(row.tolist()) for row in one}


def _taken(parameter: torch.Tensor, runs: tuple[tuple[int, int], ...]) -> torch.Tensor:
    rows = parameter.reshape(-1, parameter.shape[-1])
    return torch.cat([rows[first:end] for first, end in runs])
