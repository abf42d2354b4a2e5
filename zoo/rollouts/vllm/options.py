"""What `vllm.LLM` is started with: arguments by the recipe, and a folder with the model's files."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path

import torch

from zoo.bridge.mapping.served import vllm_rank
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.model import build
from zoo.model.lora import Adapters
from zoo.rollouts.vllm.loading import FORMAT
from zoo.types import JsonMapping, JsonObject

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_CPU_CACHE = 2**30  # bytes of the cache of keys and values without a GPU
_MEMORY = Path("/dev/shm")  # files that no disk has


def check_installed() -> None:
    """UserError where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "rl.rollout=vllm: vLLM is not installed in this environment; pip install 'zoo-train[vllm]', or take rl.rollout=zoo"
        )


def served_rank(adapters: Adapters | None, recipe: Recipe, device: torch.device) -> int | None:
    """vLLM's max_lora_rank where it takes the adapters beside the weights; None where it gets the weights with them merged in."""
    if adapters is None or adapters.not_served or (adapters.stacks and device.type == "cpu"):
        return None  # vLLM has no kernels of a CPU for adapters of experts
    return vllm_rank(recipe.lora.rank)


def write_folder(assembly: build.Assembly, config: JsonMapping) -> Path:
    """A new temporary folder with this config.json and the files of tokenizer and processor, whose limits of pixels are the run's."""
    folder = Path(tempfile.mkdtemp(prefix="zoo-vllm-", dir=_MEMORY if _MEMORY.is_dir() else None))
    assembly.save_files(folder)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assembly.served.save_pretrained(folder)
    return folder


def arguments(
    recipe: Recipe, folder: Path, device: torch.device, lora_rank: int | None, *, routing: bool
) -> JsonObject:
    """Arguments of `vllm.LLM`; rl.vllm.options stand before zoo's own.

    Args:
        folder: what `write_folder` has made.
        device: of this rank.
        lora_rank: see `served_rank`.
        routing: whether the experts of tokens are wanted.
    """
    wanted, on_gpu = recipe.rl.vllm, device.type == "cuda"
    made: JsonObject = {
        "model": str(folder),
        "dtype": _DTYPES[recipe.engine.precision or "fp32"],
        "load_format": FORMAT,
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": wanted.tensor_parallel,
        "max_model_len": wanted.max_model_len or recipe.packing.budget,
        "logprobs_mode": logprobs_mode(recipe),
        "generation_config": "vllm",  # which has no settings of the model's own
        "mm_processor_cache_gb": 0,  # a medium comes once in an epoch
        "seed": recipe.run.seed % 2**32,
        "enable_return_routed_experts": routing,
    }
    if on_gpu:
        # Its own exchange of tensors opens memory of other ranks, which the allocator's expandable segments can't.
        made |= {
            "gpu_memory_utilization": wanted.memory,
            "enable_sleep_mode": wanted.sleep,
            "disable_custom_all_reduce": True,
        }
    else:
        made |= {"kv_cache_memory_bytes": _CPU_CACHE, "enforce_eager": True}
    if lora_rank is not None:
        made |= {"enable_lora": True, "max_lora_rank": lora_rank, "max_loras": 1}
    return made | wanted.options


def logprobs_mode(recipe: Recipe) -> str:
    """Which of vLLM's log-probabilities are those under rl.temperature and before rl.top_p, of which one is 1 (`check_rl`)."""
    return "raw_logprobs" if recipe.rl.temperature == 1 else "processed_logprobs"
