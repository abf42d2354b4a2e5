"""Bytes of a rank while the model in training samples answers: keys and values of their tokens, states, and logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zoo.config.derived import data_parallel
from zoo.config.schema import Recipe
from zoo.packing.cost import LayerKind
from zoo.planner.activations import FP32, Row

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def has_frozen_copy(recipe: Recipe) -> bool:
    """Whether the first weights stay in memory, as a reference."""
    rl = recipe.rl
    by_default = rl.reference is None and rl.kl > 0 and not recipe.lora.rank
    return rl.algorithm is not None and (rl.reference == "initial" or by_default)


def answers_at_once(recipe: Recipe, row: Row, ranks: int) -> tuple[int, int]:
    """Answers that a replica generates together, and most tokens of one with its prompt (`zoo.rollouts.local_engine`).

    `row`: whose longest sample a prompt is like.
    """
    rl, budget = recipe.rl, recipe.packing.budget
    prompt = max(1, min(row.longest, budget - rl.max_new_tokens))
    prompts = -(-recipe.train.global_batch // data_parallel(recipe, ranks))
    copies = min(rl.samples, rl.batch)
    together = max(1, min(rl.batch // copies, budget // prompt, prompts))
    return together * copies, prompt + rl.max_new_tokens


def rollout_bytes(text: PretrainedConfig, kinds: Sequence[LayerKind], recipe: Recipe, row: Row, ranks: int) -> float:
    """Bytes of the cache and logits of a rank, for a decoder of layers of these `kinds`; 0 where it does not generate, or keeps no cache (over stages or context parallel ranks).

    They come beside weights, gradients and optimizer state, at another time than activations.
    """
    parallel, half = recipe.parallel, recipe.engine.precision == "bf16"
    if recipe.rl.algorithm is None or recipe.rl.rollout != "zoo" or parallel.pp * parallel.cp > 1:
        return 0.0
    answers, tokens = answers_at_once(recipe, row, ranks)
    layers = [layer_bytes(text, recipe, kind, tokens, 2 if half else 4) for kind in kinds]
    logits = 2 * text.vocab_size * FP32  # with their softmax
    return answers * (sum(layers) + max(layers) + logits)  # a layer is held twice as prompts are repeated


def layer_bytes(text: PretrainedConfig, recipe: Recipe, kind: LayerKind, tokens: int, size: int) -> float:
    """Bytes of a layer's cache for a sequence of so many tokens, `size` a number; `zoo.nn.decoder.attention.cache` has the shapes."""
    tp = recipe.parallel.tp
    if kind.linear:
        key, value = text.linear_key_head_dim, text.linear_value_head_dim
        heads, keys = text.linear_num_value_heads / tp, text.linear_num_key_heads * key / tp
        convolved = (text.linear_conv_kernel_dim - 1) * (2 * keys + heads * value)
        return convolved * size + heads * key * value * FP32
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    groups = text.num_key_value_heads
    if kind.full:
        head, groups = text.full_heads.width, text.full_heads.groups
    return 2.0 * tokens * max(groups / tp, 1) * head * size
