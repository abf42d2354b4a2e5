"""Tiny Qwen3.5-VL checkpoints in the published layout, with sizes chosen to bring mix-ups to light.

No two widths are equal, query heads are three to a key head, value heads of linear attention two to a key head, a part
of each head is rotated. Weights are random with norms, biases and decays far from where they start, so that a parameter
that is lost or swapped shows. All sizes but the layers' number can be halved for tensor parallelism.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support import tiny

EXPERT = re.compile(r"(?P<layer>.*)\.mlp\.experts\.(?P<expert>\d+)\.(?P<part>\w+)_proj\.weight")
LINEAR, FULL = "linear_attention", "full_attention"
LAYERS = (LINEAR, LINEAR, FULL, LINEAR)
TEXT = {
    "vocab_size": 386,
    "hidden_size": 44,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 14,
    "linear_value_head_dim": 10,
    "rms_norm_eps": 1e-3,  # not the default; nor does a head whose output is almost zero blow up its rounding
    "max_position_embeddings": 2048,
    "rope_parameters": tiny.ROPE
    | {"partial_rotary_factor": 0.4, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
DENSE = {"intermediate_size": 52}
SPARSE = {
    "moe_intermediate_size": 30,
    "shared_expert_intermediate_size": 38,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
VISION = tiny.VISION | {"out_hidden_size": TEXT["hidden_size"]}


def tiny_config(
    *, moe: bool = False, tied: bool = False, mtp: int = 0, layers: Sequence[str] = LAYERS, **text: Any
) -> Any:
    """transformers' config for the bundled tokenizer; `text` replaces keys of TEXT, DENSE or SPARSE."""
    from transformers import Qwen3_5Config, Qwen3_5MoeConfig

    whole = {
        **copy.deepcopy(TEXT | (SPARSE if moe else DENSE)),
        "num_hidden_layers": len(layers),
        "layer_types": list(layers),
        "mtp_num_hidden_layers": mtp,
        "tie_word_embeddings": tied,
        **text,
    }
    ids = tiny.processor("qwen35_vl", {"vision_config": VISION}).token_ids
    kind = Qwen3_5MoeConfig if moe else Qwen3_5Config
    return kind(text_config=whole, vision_config=copy.deepcopy(VISION), tie_word_embeddings=tied, **ids)


def tiny_text_config(*, moe: bool = False, tied: bool = False, **text: Any) -> Any:
    """transformers' config of the decoder alone; see `tiny_config`."""
    from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    whole = tiny_config(moe=moe, tied=tied, **text).text_config.to_dict()
    return (Qwen3_5MoeTextConfig if moe else Qwen3_5TextConfig)(**whole | {"tie_word_embeddings": tied})


@torch.no_grad()
def randomise(name: str, parameter: Tensor) -> None:
    """As for all families, but for decays, and with the decoder's norms zero-centred."""
    if name.endswith("A_log"):
        parameter.uniform_(0.02, 1).log_()  # states that last for many tokens
    else:
        tiny.randomise(name, parameter, float("visual" in name or "linear_attn" in name))


def write_tiny_qwen35(
    folder: Path, *, moe: bool = False, mtp: int = 0, stacked: bool = False, seed: int = 0, **config: Any
) -> Path:
    """Write a checkpoint of `tiny_config(moe=moe, mtp=mtp, **config)` and give back its folder.

    It has `mtp` layers of MTP under the published names, experts one by one (Qwen3.5) or `stacked` (Qwen3.6).
    """
    made = tiny_config(moe=moe, mtp=mtp, **config)

    def stored(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        further = mtp_tensors(made.text_config, mtp)
        return published(saved) | (published(further) if stacked else further)

    kind = f"Qwen3_5{'Moe' if moe else ''}ForConditionalGeneration"
    return tiny.write(folder, "qwen35_vl", kind, made, seed=seed, randomise=randomise, stored=stored)


def write_tiny_qwen35_text(folder: Path, *, moe: bool = False, mtp: int = 0, seed: int = 0, **config: Any) -> Path:
    """Write a checkpoint of `tiny_text_config(moe=moe, mtp=mtp, **config)`, experts one by one, and give back its folder."""
    made = tiny_text_config(moe=moe, mtp=mtp, **config)
    ways: dict[str, Any] = {
        "seed": seed,
        "randomise": randomise,
        "stored": lambda saved: saved | mtp_tensors(made, mtp),
    }
    return tiny.write(folder, "qwen35_text", f"Qwen3_5{'Moe' if moe else ''}ForCausalLM", made, **ways)


def mtp_tensors(text: Any, layers: int) -> dict[str, Tensor]:
    """MTP's tensors by their published names, experts one by one; none for no layers."""
    if not layers:
        return {}
    hidden, heads, kv_heads = text.hidden_size, text.num_attention_heads, text.num_key_value_heads
    shapes: dict[str, tuple[int, ...]] = {"mtp.fc.weight": (hidden, 2 * hidden)}
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        shapes[f"mtp.{norm}.weight"] = (hidden,)
    for layer in (f"mtp.layers.{index}" for index in range(layers)):
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (2 * heads * text.head_dim, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv_heads * text.head_dim, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv_heads * text.head_dim, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, heads * text.head_dim),
            f"{layer}.self_attn.q_norm.weight": (text.head_dim,),
            f"{layer}.self_attn.k_norm.weight": (text.head_dim,),
        }
        experts = getattr(text, "num_experts", 0)
        if not experts:
            shapes |= _mlp(f"{layer}.mlp", hidden, text.intermediate_size)
            continue
        shapes[f"{layer}.mlp.gate.weight"] = (experts, hidden)
        shapes[f"{layer}.mlp.shared_expert_gate.weight"] = (1, hidden)
        shapes |= _mlp(f"{layer}.mlp.shared_expert", hidden, text.shared_expert_intermediate_size)
        for expert in range(experts):
            shapes |= _mlp(f"{layer}.mlp.experts.{expert}", hidden, text.moe_intermediate_size)
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        randomise(name, tensor)
    return tensors


def _mlp(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    up = {f"{name}.{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
    return up | {f"{name}.down_proj.weight": (hidden, width)}


def published(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as transformers saves them, in the hub's layout: it writes the decoder's experts one by one, the hub has stacks."""
    out, experts = {}, {}
    for name, tensor in saved.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match["layer"], {})[int(match["expert"]), match["part"]] = tensor
        else:
            out[name] = tensor
    for layer, parts in experts.items():
        count = 1 + max(expert for expert, _ in parts)
        gate, up, down = (
            torch.stack([parts[expert, part] for expert in range(count)]) for part in ("gate", "up", "down")
        )
        out[f"{layer}.mlp.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        out[f"{layer}.mlp.experts.down_proj"] = down
    return out
