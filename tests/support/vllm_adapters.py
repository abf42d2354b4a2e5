"""An adapter in vLLM, in an environment of its own: PYTHON vllm_adapters.py BASE MERGED ADAPTER [IDS]; prints one line of JSON.

vLLM's own loader puts the adapter into its layers. What it puts there must be what separates the merged weights from the base's,
as vLLM itself loads these: "weights" has, by module, the largest difference and the largest change. With IDS, which have commas
between them, "logprobs" has those of a prompt from base, adapter and merged weights. A CPU has no kernels for adapters of experts.
"""

import json
import os
import sys
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0"
)


def main(base: str, merged: str, adapter: str, ids: list[int]) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    request = LoRARequest("adapter", 1, adapter)
    keep_weights()
    with_adapter = engine(base)
    logprobs = {"base": scores(with_adapter, ids, None), "adapter": scores(with_adapter, ids, request)} if ids else {}
    assert with_adapter.llm_engine.add_lora(request) or ids
    (layers,) = with_adapter.collective_rpc(layers_of)
    plain = engine(merged)
    (wanted,) = plain.collective_rpc(layers_of)
    if ids:
        logprobs["merged"] = scores(plain, ids, None)
    compared = {
        name: (float((weight + change - wanted[name][0]).abs().max()), float(change.abs().max()))
        for name, (weight, change) in layers.items()
    }
    return {"weights": compared, "logprobs": logprobs}


def keep_weights() -> None:
    """Have linears keep the weights that a CPU's kernels pack into another layout."""
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack(layer, False)


def engine(model: str) -> Any:
    from vllm import LLM

    with open(f"{model}/config.json") as config:
        media = {"limit_mm_per_prompt": {"image": 0, "video": 0}} if "vision_config" in config.read() else {}
    return LLM(
        model=model, dtype="float32", max_model_len=512, max_num_seqs=4, enforce_eager=True, enable_prefix_caching=False,
        distributed_executor_backend="uni", enable_lora=True, max_lora_rank=8, max_loras=1, **media,
    )  # fmt: skip


def scores(llm: Any, ids: list[int], request: Any) -> list[float]:
    from vllm import SamplingParams

    settings = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    (answer,) = llm.generate([{"prompt_token_ids": ids}], settings, lora_request=request)
    return [options[token].logprob for options, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)]


def layers_of(worker: Any) -> dict[str, Any]:
    """(weight, what its adapter adds) of every layer that can have one."""
    import torch

    found = {}
    for name, layer in worker.model_runner.lora_manager._adapter_manager.modules.items():
        if hasattr(layer, "w13_lora_a_stacked"):
            for part in ("w13", "w2"):
                a, b = (getattr(layer, f"{part}_lora_{side}_stacked") for side in "ab")
                change = torch.cat([up[0] @ down[0] for down, up in zip(a, b, strict=True)], dim=1)
                found[f"{name}.{part}"] = weight_of(layer.base_layer, part), change
        elif isinstance(getattr(layer, "lora_a_stacked", None), tuple):  # not embedding and head
            pairs = zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
            found[name] = weight_of(layer.base_layer), torch.cat([up[0, 0] @ down[0, 0] for down, up in pairs])
    return found


def weight_of(module: Any, part: str = "") -> Any:
    return getattr(module.routed_experts, f"{part}_weight").data if part else module.weight.data


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[4].split(",")] if len(sys.argv) > 4 else []
    print(json.dumps(main(*sys.argv[1:4], given)))
