"""Stand-ins for the tests of the bridge: tiny checkpoints, modules with Megatron-Core's names, ranks as threads.

The expected tensors are made here by plain index arithmetic from transformers' modules in memory, on purpose not
with the code under test.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.tiny import thinker_names
from torch import Tensor, nn

from zoo.bridge import Comm, Dims, ShardInfo

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 12, 4, 6, 24  # GQA ratio 3; heads * head_dim is not the hidden size
EXPERTS, MOE_WIDTH, DENSE_WIDTH, VOCAB, LAYERS = 4, 10, 28, 98, 4
DENSE_LAYER = 1

TEXT = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": DENSE_WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "moe_intermediate_size": MOE_WIDTH,
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "mlp_only_layers": [DENSE_LAYER], "max_position_embeddings": 128,
}  # fmt: skip
VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 4, "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
AUDIO = {
    "num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 20, "d_model": 16,
    "output_dim": HIDDEN, "downsample_hidden_size": 4, "max_source_positions": 32,
}  # fmt: skip
THINKER = {"text_config": TEXT, "vision_config": VISION, "audio_config": AUDIO}
_SPEAKER = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
TALKER = {
    "text_config": {
        **_SPEAKER, "vocab_size": 50, "num_hidden_layers": 2, "moe_intermediate_size": 6, "num_experts": 4,
        "num_experts_per_tok": 2, "shared_expert_intermediate_size": 8,
    },
    "code_predictor_config": {
        **_SPEAKER, "vocab_size": 30, "intermediate_size": 20, "num_hidden_layers": 1, "num_code_groups": 3,
    },
    "num_code_groups": 3, "thinker_hidden_size": HIDDEN, "spatial_merge_size": 2,
}  # fmt: skip
CODE2WAV = {
    "codebook_size": 20, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 20,
    "num_hidden_layers": 1, "num_quantizers": 3, "upsample_rates": [2, 2], "upsampling_ratios": [2], "decoder_dim": 16,
}  # fmt: skip
DIMS = Dims.from_hf(TEXT)


@dataclass(frozen=True)
class Tiny:
    """Folders of the checkpoints, and the full zoo tensors they should become."""

    thinker: Path
    silent: Path
    talking: Path
    state: dict[str, Tensor]


def write_tiny_checkpoints(folder: Path) -> Tiny:
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    torch.manual_seed(0)
    config = Qwen3OmniMoeConfig(thinker_config=THINKER, talker_config=TALKER, code2wav_config=CODE2WAV)
    model = Qwen3OmniMoeForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder / "talking", max_shard_size="200KB")
    model.thinker.save_pretrained(folder / "thinker")
    model.disable_talker()
    model.config.enable_audio_output = False
    model.save_pretrained(folder / "silent")
    state = zoo_state(thinker_names({k: v.detach() for k, v in model.thinker.named_parameters()}))
    return Tiny(folder / "thinker", folder / "silent", folder / "talking", state)


COPIED = {  # parts of a layer
    "input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj", "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}  # fmt: skip


def zoo_state(hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """Full zoo tensors by global name, from the thinker's parameters in memory (experts fused)."""
    state = {"embedding.word_embeddings.weight": hf["model.embed_tokens.weight"]}
    for i in range(LAYERS):
        old, new = f"model.layers.{i}", f"decoder.layers.{i}"
        q, k, v = (hf[f"{old}.self_attn.{p}_proj.weight"].split(HEAD_DIM) for p in "qkv")
        ratio = HEADS // KV_HEADS
        heads = [h for g in range(KV_HEADS) for h in (*q[g * ratio : (g + 1) * ratio], k[g], v[g])]
        state[f"{new}.self_attention.linear_qkv.weight"] = torch.cat(heads)
        state |= {f"{new}.{ours}.weight": hf[f"{old}.{theirs}.weight"] for ours, theirs in COPIED.items()}
        if i == DENSE_LAYER:
            halves = [hf[f"{old}.mlp.{p}_proj.weight"] for p in ("gate", "up")]
            state[f"{new}.mlp.linear_fc1.weight"] = torch.cat(halves)
            state[f"{new}.mlp.linear_fc2.weight"] = hf[f"{old}.mlp.down_proj.weight"]
        else:
            state[f"{new}.mlp.router.weight"] = hf[f"{old}.mlp.gate.weight"]
            state[f"{new}.mlp.experts.weight1"] = hf[f"{old}.mlp.experts.gate_up_proj"]
            state[f"{new}.mlp.experts.weight2"] = hf[f"{old}.mlp.experts.down_proj"]
    state["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    state["output_layer.weight"] = hf["lm_head.weight"]
    for old, new in (("visual.", "vision."), ("audio_tower.", "audio.")):
        state |= {new + name.removeprefix(old): t for name, t in hf.items() if name.startswith(old)}
    return state


def local_part(name: str, full: Tensor, info: ShardInfo) -> Tensor:
    """What the rank at `info` should hold of the full zoo tensor."""

    def part(size: int, rank: int, ranks: int) -> slice:
        return slice(rank * size // ranks, (rank + 1) * size // ranks)

    tp, etp = (info.tp_rank, info.tp_size), (info.etp_rank, info.etp_size)
    if name.endswith(("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight")):
        return full[part(full.shape[0], *tp)]
    if name.startswith("decoder") and name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return full[:, part(full.shape[1], *tp)]
    if name.startswith("decoder") and name.endswith("linear_fc1.weight"):
        gate, up = full[:DENSE_WIDTH], full[DENSE_WIDTH:]
        return torch.cat([gate[part(DENSE_WIDTH, *tp)], up[part(DENSE_WIDTH, *tp)]])
    mine = part(EXPERTS, info.ep_rank, info.ep_size)
    if name.endswith("experts.weight1"):
        gate, up = full[mine, :MOE_WIDTH], full[mine, MOE_WIDTH:]
        return torch.cat([gate[:, part(MOE_WIDTH, *etp)], up[:, part(MOE_WIDTH, *etp)]], dim=1)
    if name.endswith("experts.weight2"):
        return full[mine][:, :, part(MOE_WIDTH, *etp)]
    return full


def put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Add a parameter under a dotted name."""
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(leaf, nn.Parameter(tensor.clone()))


def build_chunk(
    state: dict[str, Tensor], info: ShardInfo, layers: range = range(LAYERS), *, zero: bool = True
) -> nn.Module:
    """A (virtual) pipeline chunk with these decoder layers, zeroed or filled, layers numbered as Megatron-Core does."""
    chunk = nn.Module()
    first, last = layers.start == 0, layers.stop == LAYERS
    for name, full in state.items():
        part = local_part(name, full, info)
        local = name
        if name.startswith("decoder.layers."):
            index, rest = name.removeprefix("decoder.layers.").split(".", 1)
            if int(index) not in layers:
                continue
            local = f"decoder.layers.{int(index) - layers.start}.{rest}"
        elif not (last if name.startswith(("decoder.final", "output_layer")) else first):
            continue
        put(chunk, local, torch.zeros_like(part) if zero else part)
    for i, layer in chunk.get_submodule("decoder.layers").named_children():
        layer.layer_number = layers.start + int(i) + 1
    return chunk


def expected_chunk(state: dict[str, Tensor], info: ShardInfo, layers: range) -> dict[str, Tensor]:
    return dict(build_chunk(state, info, layers, zero=False).named_parameters())


class ThreadWorld:
    """Ranks as threads of this process: `run` calls one function per rank with a Comm that gathers among them."""

    def __init__(self, infos: list[ShardInfo], stages: list[int]) -> None:
        self.infos, self.stages = infos, stages
        self._lock = threading.Lock()
        self._slots: dict[Any, dict[int, Any]] = {}
        self._barriers: dict[Any, threading.Barrier] = {}

    def members(self, rank: int, axis: str) -> list[int]:
        """The ranks of a group: same stage, same place but on `axis`."""

        def place(r: int) -> tuple[int, ...]:
            i = self.infos[r]
            others = {"tp": (i.dp_rank,), "ep": (i.etp_rank, i.edp_rank), "etp": (i.ep_rank, i.edp_rank)}
            return (self.stages[r], *others[axis])

        return [r for r in range(len(self.infos)) if place(r) == place(rank)]

    def exchange(self, members: list[int], rank: int, tag: str, value: Any) -> list[Any]:
        key = (tag, tuple(members))
        with self._lock:
            barrier = self._barriers.setdefault(key, threading.Barrier(len(members), timeout=20))
            self._slots.setdefault(key, {})[rank] = value
        barrier.wait()
        values = [self._slots[key][r] for r in members]
        barrier.wait()
        return values

    def run(self, work: Callable[[int, ShardInfo, Comm], Any]) -> list[Any]:
        """The result, or the exception, of every rank."""
        results: list[Any] = [None] * len(self.infos)

        def call(rank: int) -> None:
            try:
                results[rank] = work(rank, self.infos[rank], ThreadComm(self, rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(self.infos))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class ThreadComm(Comm):
    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world, self.rank = world, rank

    def gather(self, tensor: Tensor, axis: str) -> list[Tensor]:
        members = self.world.members(self.rank, axis)
        return self.world.exchange(members, self.rank, axis, tensor.clone())

    def gather_objects(self, value: Any) -> list[Any]:
        return self.world.exchange(list(range(len(self.world.infos))), self.rank, "world", value)


def grid(tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1, etp: int = 1) -> ThreadWorld:
    """tp * dp ranks per stage, the same ranks as ep * etp * (the rest) for experts, in Megatron-Core's order."""
    sizes = {"tp_size": tp, "ep_size": ep, "etp_size": etp}

    def info(r: int) -> ShardInfo:
        experts = {"etp_rank": r % etp, "ep_rank": r // etp % ep, "edp_rank": r // (etp * ep)}
        return ShardInfo(tp_rank=r % tp, dp_rank=r // tp, **experts, **sizes)

    stages = [stage for stage in range(pp) for _ in range(tp * dp)]
    return ThreadWorld([info(r) for _ in range(pp) for r in range(tp * dp)], stages)


def read_all(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder, by the safetensors library alone."""
    from safetensors.torch import load_file

    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
