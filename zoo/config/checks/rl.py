"""Checks of reinforcement learning's keys, and what follows for those left open. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from zoo.config.architecture import num_experts
from zoo.config.devices import gpu_count
from zoo.config.schema import Recipe
from zoo.config.schema.rl import DEFAULTS
from zoo.errors import ConfigError
from zoo.types import JsonObject


def derived_rl(recipe: Recipe) -> JsonObject:
    """Values of the keys that a recipe of reinforcement learning leaves open."""
    rl = recipe.rl
    if rl.algorithm is None:
        return {}
    known = {"dynamic_sampling": 0, "overlong_buffer": 0, **DEFAULTS[rl.algorithm]}
    if rl.algorithm == "dapo":
        known["overlong_buffer"] = rl.max_new_tokens // 5
    changes = {f"rl.{name}": value for name, value in known.items() if getattr(rl, name) is None}
    if rl.reference is None:
        changes["rl.reference"] = "none" if not rl.kl else "base" if recipe.lora.rank else "initial"
    if not rl.rewards:
        changes["rl.rewards"] = {"exact_match" if rl.reward_model is None else "model": 1.0}
    if rl.router_replay is None:
        changes["rl.router_replay"] = num_experts(recipe.model.arch) > 0 and next(_no_replay(recipe), None) is None
    if recipe.train.keep_best == "loss":
        changes["train.keep_best"] = "reward"
    changes["train.mtp_loss"] = 0.0  # depths of multi-token prediction are not the policy
    changes["lora.dropout"] = 0.0  # its noise would stand in the ratios
    return changes


def check_rl(recipe: Recipe) -> None:
    """ConfigError for keys that contradict one another, or that prompts and sampled answers have no use for."""
    rl, train, data = recipe.rl, recipe.train, recipe.data
    if rl.algorithm is None:
        return
    wanted: tuple[tuple[str, object, tuple[object, ...]], ...] = (
        ("train.loss", train.loss, ("nll",)),
        ("distill.teacher", recipe.distill.teacher, (None,)),
        ("packing.mode", recipe.packing.mode, ("thd",)),
        ("data.overlong", data.overlong, ("error", "drop")),
        ("data.augment", data.augment or 0, (0,)),
        ("data.blank_answers", data.blank_answers or 0, (0,)),
    )
    for key, value, fitting in wanted:
        if value not in fitting:
            choices = " or ".join(f"{key}={'null' if choice is None else choice}" for choice in fitting)
            raise ConfigError(f"{key}={value} with rl.algorithm={rl.algorithm}: sampled answers go with {choices}")
    if rl.max_new_tokens >= recipe.packing.budget:
        raise ConfigError(
            f"rl.max_new_tokens={rl.max_new_tokens} leaves no room for a prompt in packing.budget={recipe.packing.budget}; lower one, or raise the other"
        )
    if (rl.overlong_buffer or 0) > rl.max_new_tokens:
        raise ConfigError(
            f"rl.overlong_buffer={rl.overlong_buffer} is above rl.max_new_tokens={rl.max_new_tokens}; wanted at most that"
        )
    if rl.rollout == "vllm" and rl.temperature != 1 and rl.top_p != 1:
        raise ConfigError(
            f"rl.temperature={rl.temperature:g} with rl.top_p={rl.top_p:g}: vLLM gives log-probabilities before both or behind both, and "
            "the loss needs those between them; take 1 for one of them, or rl.rollout=zoo"
        )
    if (rl.reward_model is None) is ("model" in rl.rewards):
        present = f"rl.reward_model={rl.reward_model}" if rl.reward_model else "rl.rewards has model"
        do = (
            "give it a weight, as in rl.rewards={model: 1}" if rl.reward_model else "name its folder by rl.reward_model"
        )
        raise ConfigError(f"{present}, and the other is not there; {do}, or leave it out")
    _check_reference(recipe)
    for key in ("steps", "save_every", "eval_every"):
        if (value := getattr(train, key) or 0) % rl.updates:
            raise ConfigError(
                f"train.{key}={value} with rl.updates={rl.updates}: a run evaluates, saves and ends between rollouts; give a multiple of "
                "rl.updates"
            )
    if rl.router_replay and (why := next(_no_replay(recipe), None)) is not None:
        raise ConfigError(f"rl.router_replay=true {why}; set rl.router_replay=false")


def _check_reference(recipe: Recipe) -> None:
    rl, adapters = recipe.rl, recipe.lora.rank > 0
    if rl.kl and rl.reference == "none":
        raise ConfigError(
            f"rl.kl={rl.kl:g} with rl.reference=none: there is nothing to diverge from; leave rl.reference out"
        )
    if rl.reference == "base" and not adapters:
        raise ConfigError(
            "rl.reference=base without adapters: it is the model without them; give lora.rank, or rl.reference=initial"
        )
    if rl.reference == "initial" and adapters:
        raise ConfigError(
            f"rl.reference=initial with lora.rank={recipe.lora.rank}: the first weights are there without a copy; take rl.reference=base"
        )


def _no_replay(recipe: Recipe) -> Iterator[str]:
    """Why training can't take the experts of rollouts."""
    if recipe.rl.rollout == "vllm" and not (recipe.machine.gpus or gpu_count()):
        yield "without a GPU, where vLLM tells no experts"
    if recipe.engine.recompute == "selective":
        yield "with engine.recompute=selective, which chooses experts again"
