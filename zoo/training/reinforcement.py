"""What a run of reinforcement learning is made of beside its loader.

That is the engine that generates, rewards, log-probabilities of a rollout by models that the update does not run, and answers to
held-out rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from zoo.checkpoint import initial_weights
from zoo.checkpoint.sharded_state import Trainable
from zoo.config.schema import Recipe
from zoo.data.sample import MicroBatch
from zoo.model import build
from zoo.model.build import Assembly
from zoo.model.lora import Adapters
from zoo.parallel.world import World
from zoo.rollouts.engine import GreedyEngine, RolloutEngine
from zoo.rollouts.evaluation import HeldOutAnswers
from zoo.rollouts.loader import Connections, RolloutLoader, together
from zoo.rollouts.local_engine import LocalEngine
from zoo.rollouts.rewards.model import RewardModel
from zoo.rollouts.rewards.rewards import open_rewards
from zoo.steps.packed_step import PackedStep
from zoo.training.dataloader import RunData
from zoo.training.evaluation import in_eval_mode, token_logprobs

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


def connect(
    data: RunData, recipe: Recipe, assembly: Assembly, trained: Trainable, step: PackedStep, world: World
) -> None:
    """Give a run's rollouts what they need of it; nothing where its steps are no rollouts.

    A frozen copy of the first weights is in memory as long as the run, where it is the reference.

    Args:
        trained: the model in training, whose step is `step`.
    """
    loader, rl, chunks = data.loader, recipe.rl, trained.chunks
    if not isinstance(loader, RolloutLoader):
        return
    replay, tick = bool(rl.router_replay), data.decoder.tick
    engine, rewards = _engine(recipe, assembly, trained, world, replay), open_rewards(recipe, tick)
    together(loader.group, lambda: rewards.start() if world.counts_data else None)
    reward_model = None
    if rl.reward_model is not None:
        reward_model = RewardModel(recipe, assembly, world, loader.group, token_logprobs)
    passes = [PolicyLogprobs("old", step, chunks, world)] if rl.updates > 1 else []
    if rl.reference == "base":
        passes.append(PolicyLogprobs("reference", step, chunks, world, trained.adapters))
    elif rl.reference == "initial":
        first = build.assemble(recipe, assembly.source)
        copies = initial_weights.load_frozen(first, recipe, world)
        passes.append(PolicyLogprobs("reference", step, copies, world))
    greedy = engine if isinstance(engine, GreedyEngine) else None
    answerer = HeldOutAnswers(recipe, assembly, world, chunks, rewards, loader.group, reward_model, greedy)
    loader.connect(Connections(engine, rewards, passes, replay, tick, answerer, reward_model))


def _engine(recipe: Recipe, assembly: Assembly, trained: Trainable, world: World, replay: bool) -> RolloutEngine:
    """What generates: the model itself, or vLLM."""
    if recipe.rl.rollout == "zoo":
        return LocalEngine(recipe, assembly, trained.chunks, world, replay=replay)
    from zoo.rollouts.vllm.engine import VllmEngine

    return VllmEngine(recipe, assembly, trained, world, replay=replay)


@dataclass(frozen=True)
class PolicyLogprobs:
    """Gives micro-batches of sampled answers the log-probability of each label, `old` or of the `reference`."""

    field: Literal["old", "reference"]
    step: PackedStep
    chunks: Sequence[MegatronModule]
    world: World
    without: Adapters | None = None  # of the reference, which the model has and is taken without

    @torch.no_grad()
    def __call__(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches, with log-probabilities where this rank has the loss. Every rank calls it with as many."""
        completed = []
        with in_eval_mode(self.chunks), self.without.off() if self.without is not None else nullcontext():
            for batch in batches:
                assert batch.policy is not None
                values = token_logprobs(self.step, self.chunks, batch, self.world)
                old, reference = batch.policy.old, batch.policy.reference
                old, reference = (values, reference) if self.field == "old" else (old, values)
                completed.append(replace(batch, policy=batch.policy._replace(old=old, reference=reference)))
        return completed
