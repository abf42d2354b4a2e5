"""Bytes of a GPU that vLLM takes while it generates rollouts: its weights, keys and values of answers, and room to work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from zoo.config.devices import gpu_count, gpu_memory
from zoo.config.schema import Recipe
from zoo.packing.cost import LayerKind
from zoo.planner.activations import Row
from zoo.planner.rollouts import layer_bytes
from zoo.types import JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WORK = 3e9  # bytes of activations, logits and CUDA graphs, by rule of thumb


@dataclass(frozen=True)
class VllmMemory:
    """What of a GPU vLLM fills with rl.vllm.memory.

    Attributes:
        share: bytes of all.
        weights: bytes of the weights, which its own tensor parallel ranks share.
        cache: bytes that are left for keys and values.
        answers: how many of the longest answers, with their prompts, these hold at once; others wait.
        tokens: of such an answer.
    """

    share: float
    weights: float
    cache: float
    answers: int
    tokens: int

    @property
    def fits(self) -> bool:
        """Whether it can answer one prompt."""
        return self.answers > 0

    def as_dict(self) -> JsonObject:
        """Plain values."""
        return {**asdict(self), "fits": self.fits}


def vllm_bytes(recipe: Recipe) -> float:
    """Bytes of a GPU that vLLM fills; 0 where it does not generate, or no GPU's memory is known."""
    if recipe.rl.algorithm is None or recipe.rl.rollout != "vllm":
        return 0.0
    known = recipe.machine.memory_gb
    memory = known * 1e9 if known is not None else gpu_memory() if gpu_count() else 0.0
    return recipe.rl.vllm.memory * memory


def vllm_memory(
    parameters: int, text: PretrainedConfig, kinds: Sequence[LayerKind], recipe: Recipe, row: Row
) -> VllmMemory | None:
    """What vLLM's share holds; None where it has none.

    Args:
        parameters: of the whole model.
        text: config of its decoder, of layers of these `kinds`.
        row: whose longest sample a prompt is like.
    """
    share, rl = vllm_bytes(recipe), recipe.rl
    if not share:
        return None
    size, ranks = 2 if recipe.engine.precision == "bf16" else 4, rl.vllm.tensor_parallel
    most = rl.vllm.max_model_len or recipe.packing.budget
    tokens = max(1, min(row.longest + rl.max_new_tokens, most))
    cut = replace(recipe, parallel=replace(recipe.parallel, tp=ranks))
    answer = sum(layer_bytes(text, cut, kind, tokens, size) for kind in kinds)
    weights = parameters * size / ranks
    cache = max(0.0, share - weights - WORK)
    return VllmMemory(share, weights, cache, int(cache / answer), tokens)


def beside_vllm(activations: float, given_back: float, recipe: Recipe) -> float:
    """Bytes that activations and vLLM take of a GPU, beside the weights and what of a rank stays there.

    Args:
        given_back: bytes of gradients and optimizer state, which are on the host while vLLM works and are counted by themselves.
    """
    share = vllm_bytes(recipe)
    return max(activations, share - given_back) if recipe.rl.vllm.sleep else activations + share
