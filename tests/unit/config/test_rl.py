"""Reinforcement learning's keys: what follows for those left open, and what contradicts."""

from typing import Any

import pytest

from zoo.config.compose import load_recipe
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.errors import ConfigError


def resolved(*overrides: str, recipe: str = "qwen3_vl_grpo", ranks: int = 1) -> Recipe:
    return validate(load_recipe(recipe, ["size=tiny", "hardware=cpu", *overrides]), ranks)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ((), {"clip_low": 0.2, "clip_high": 0.2, "length_norm": "sequence", "std_norm": True, "reference": "none", "dynamic_sampling": 0}),
        (("rl.algorithm=gspo",), {"clip_low": 3e-4, "clip_high": 4e-4}),
        (("rl.algorithm=dapo", "rl.max_new_tokens=100"), {"clip_high": 0.28, "length_norm": "token", "dynamic_sampling": 10, "overlong_buffer": 20}),
        (("rl.algorithm=rloo",), {"std_norm": False, "length_norm": "constant"}),
        (("rl.algorithm=cispo",), {"clip_low": 1.0, "clip_high": 4.0}),
        (("rl.algorithm=dapo", "rl.clip_high=0.3", "rl.overlong_buffer=0"), {"clip_high": 0.3, "overlong_buffer": 0}),
        (("rl.kl=0.1",), {"reference": "initial"}),
        (("rl.kl=0.1", "lora.rank=4"), {"reference": "base"}),
        ((), {"rewards": {"exact_match": 1.0}, "router_replay": False}),
        (("rl.reward_model=runs/reward",), {"rewards": {"model": 1.0}}),
    ],
)  # fmt: skip
def test_what_an_algorithm_leaves_open_is_as_its_paper_has_it(
    overrides: tuple[str, ...], wanted: dict[str, Any]
) -> None:
    made = resolved(*overrides)
    assert {name: getattr(made.rl, name) for name in wanted} == wanted
    assert (made.train.mtp_loss, made.lora.dropout, made.train.keep_best) == (0, 0, "reward")
    assert validate(made, 1) == made


def test_experts_of_rollouts_are_taken_where_they_are_known() -> None:
    assert resolved("size=tiny-moe", recipe="qwen3_vl_moe_grpo").rl.router_replay is True
    assert resolved("size=tiny-moe", "parallel.pp=2", recipe="qwen3_vl_moe_grpo", ranks=2).rl.router_replay is True
    again = ("size=tiny-moe", "engine.recompute=selective")
    assert resolved(*again, recipe="qwen3_vl_moe_grpo").rl.router_replay is False


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("train.loss=dpo",), "train.loss=nll"),
        (("packing.mode=none",), "packing.mode=thd"),
        (("data.augment=0.5",), "data.augment=0"),
        (("rl.kl=0.1", "rl.reference=none"), "nothing to diverge from"),
        (("rl.reference=base",), "rl.reference=initial"),
        (("lora.rank=4", "rl.reference=initial"), "rl.reference=base"),
        (("rl.max_new_tokens=5000",), "leaves no room for a prompt"),
        (("rl.overlong_buffer=300",), "rl.max_new_tokens=256"),
        (("rl.updates=3", "train.steps=8"), "give a multiple of rl.updates"),
        (("rl.updates=2", "train.steps=8", "train.save_every=3"), "train.save_every=3"),
        (("rl.temperature=0",), "above 0"),
        (("rl.algorithm=ppo",), "one of grpo, gspo, dapo, rloo, cispo"),
        (("rl.clip=0.2",), "no such key"),
    ],
)
def test_keys_that_contradict_are_refused_with_a_sentence(overrides: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(*overrides)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_experts_that_are_not_known_cannot_be_asked_for() -> None:
    more = ("size=tiny-moe", "rl.router_replay=true", "engine.recompute=selective")
    with pytest.raises(ConfigError, match=r"set rl\.router_replay=false"):
        resolved(*more, recipe="qwen3_vl_moe_grpo")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rl.rewards={model: 1}"], "rl.rewards has model.*name its folder by rl.reward_model"),
        (["rl.rewards={anls: 1}", "rl.reward_model=runs/reward"], r"rl\.reward_model=runs/reward.*rl\.rewards=\{model: 1\}"),
    ],
)  # fmt: skip
def test_a_reward_model_and_its_weight_go_together(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(*overrides)
