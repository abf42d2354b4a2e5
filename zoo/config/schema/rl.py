"""Keys of reinforcement learning: rollouts, rewards, advantages and the policy's loss (docs/rl.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from zoo.config.layers.keys import ALWAYS, Bounds, number, section, setting
from zoo.config.schema import conditions

# What an algorithm's paper has for each key that is left open: DeepSeekMath (arXiv 2402.03300), GSPO (2507.18071), DAPO (2503.14476),
# RLOO (2402.14740) and CISPO (2506.13585, whose weights have no lower bound; the upper one is ScaleRL's, 2510.13786).
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {"clip_low": 0.2, "clip_high": 0.2, "length_norm": "sequence", "std_norm": True},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "length_norm": "sequence", "std_norm": True},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "length_norm": "token", "std_norm": True, "dynamic_sampling": 10},
    "rloo": {"clip_low": 0.2, "clip_high": 0.2, "length_norm": "constant", "std_norm": False},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "length_norm": "token", "std_norm": True},
}

# A key and its default with the bounds of a number stay on one line.
# fmt: off


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class VllmConfig:
    """vLLM's engines, one for each group of ranks that generates together."""

    memory: float = number(0.4, above=0, below=1, when=(conditions.RL, conditions.VLLM))
    """share of a GPU's memory that vLLM takes: weights, cache and work (its gpu_memory_utilization)"""
    tensor_parallel: int = number(1, 1, 1024, when=(conditions.RL, conditions.VLLM))
    """ranks of an engine"""
    sleep: bool = setting(True, when=(conditions.RL, conditions.VLLM))
    """vLLM gives its memory back while zoo trains; zoo's gradients and optimizer state leave the GPU while vLLM works"""
    max_model_len: int | None = number(None, 1, 10**8, when=(conditions.RL, conditions.VLLM))
    """most tokens of a prompt with its answer; default: packing.budget"""
    options: dict[str, Any] = setting(dict, when=(conditions.RL, conditions.VLLM))
    """further arguments of vllm.LLM"""


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class RlConfig:
    """Reinforcement learning from rewards of sampled answers (docs/rl.md)."""

    algorithm: Literal["grpo", "gspo", "dapo", "rloo", "cispo"] | None = setting(None, when=ALWAYS)
    """grpo | gspo (ratios of whole answers) | dapo | rloo | cispo; null: no reinforcement learning"""
    samples: int = number(8, 2, 10**4, when=conditions.RL)
    """answers to each prompt, which are compared with one another; train.global_batch counts prompts"""
    updates: int = number(1, 1, 10**4, when=conditions.RL)
    """optimizer updates, which are steps of the run, on the answers of a rollout"""
    temperature: float = number(1.0, above=0, most=100, when=conditions.RL)
    """of the draws; all log-probabilities are those of logits divided by it"""
    top_p: float = number(1.0, above=0, most=1, when=conditions.RL)
    """draws from the most likely tokens alone that together reach this probability"""
    max_new_tokens: int = number(256, 1, 10**7, when=conditions.RL)
    """most tokens of an answer"""
    clip_low: float | None = number(None, 0, 1, when=conditions.RL)
    """the ratio's lower bound is 1 - clip_low; default: 0.2 | gspo 0.0003 | cispo 1 (none)"""
    clip_high: float | None = number(None, 0, 1e6, when=conditions.RL)
    """the ratio's upper bound is 1 + clip_high; default: 0.2 | gspo 0.0004 | dapo 0.28 | cispo 4"""
    length_norm: Literal["token", "sequence", "constant"] | None = setting(None, when=conditions.RL)
    """the loss is a mean over tokens | over answers of means over their tokens | over answers of sums divided by max_new_tokens; default: sequence | dapo, cispo token | rloo constant"""
    std_norm: bool | None = setting(None, when=conditions.RL)
    """advantages are divided by the group's standard deviation of rewards; default: true | rloo false"""
    kl: float = number(0.0, 0, 1e6, when=conditions.RL)
    """weight of the divergence from the reference in the loss"""
    reference: Literal["none", "base", "initial"] | None = setting(None, when=conditions.RL)
    """base (the weights without adapters) | initial (a frozen copy of the first ones); default: none without rl.kl, else base with adapters and initial without"""
    dynamic_sampling: int | None = number(None, 0, 10**4, when=conditions.RL)
    """most rounds of rollouts until global_batch groups have answers of different rewards; 0: groups of equal rewards stay; default: 0 | dapo 10"""
    overlong_buffer: int | None = number(None, 0, 10**7, when=conditions.RL)
    """the last tokens below max_new_tokens over which an answer's reward falls by up to 1; 0: none; default: 0 | dapo a fifth of max_new_tokens"""
    mask_truncated: bool = setting(False, when=conditions.RL)
    """answers that were cut at max_new_tokens are not trained on"""
    entropy: float = number(0.0, 0, 1e6, when=conditions.RL)
    """weight of the mean entropy, which the loss is lowered by"""
    importance: Literal["truncated", "none"] = setting("truncated", when=conditions.RL)
    """truncated: a token's loss is weighted by the trainer's probability over the rollout's, at most importance_cap"""
    importance_cap: float = number(2.0, above=0, most=1e6, when=(conditions.RL, conditions.IMPORTANCE))
    """largest such weight"""
    rewards: dict[str, float] = setting(dict, when=conditions.RL, bounds=Bounds(least=-1e6, most=1e6))
    """weight of each reward: exact_match, accuracy, anls, number, iou, wer, cer, format, model, module:function or file.py:function; default: {exact_match: 1}, with rl.reward_model {model: 1}"""
    reward_model: str | None = setting(None, when=conditions.RL)
    """a model that scores answers (train.loss=reward), as model.init names one; its score is the reward `model`"""
    reward_seconds: float = number(30.0, above=0, most=1e6, when=conditions.RL)
    """longest time that a reward's function may take for an answer"""
    reward_processes: int | None = number(None, 1, 1024, when=conditions.RL)
    """processes, a rank, that call functions of the user's; default: by the cores"""
    on_reward_error: Literal["raise", "zero"] = setting("raise", when=conditions.RL)
    """raise | zero: a reward that fails, takes too long or is not finite counts 0, and is counted"""
    rollout: Literal["zoo", "vllm"] = setting("zoo", when=conditions.RL)
    """zoo: the model in training generates, on any machine and layout | vllm: vLLM on the same GPUs"""
    batch: int = number(256, 1, 10**6, when=(conditions.RL, conditions.ZOO_ROLLOUT))
    """answers that a replica generates at once, within packing.budget tokens of prompts"""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    router_replay: bool | None = setting(None, when=(conditions.RL, conditions.EXPERTS))
    """training takes the experts that the rollout took; default: where the model has experts and the rollout tells"""
    ahead: int = number(0, 0, 1, when=conditions.RL)
    """1: rollouts are made a step ahead, by the weights before the last update"""


# fmt: on
