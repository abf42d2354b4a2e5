"""`RolloutLoader`: optimizer steps from rollouts, in the place of a `BatchLoader`.

A rollout: prompts are drawn and dealt to replicas, each samples answers, rewards come back to all ranks, and advantages follow from
them. The answers stay on their replica, packed into micro-batches of rl.updates steps. What is drawn, and which answers are
trained on in which update, follows from the seed and the rewards alone, whatever the number of ranks.

Under rl.ahead=1 the answers of the next rollout are sampled before the updates of this one, and their rewards computed beside them.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from zoo.config.schema import Recipe
from zoo.data.loading.batches import with_most_tokens
from zoo.data.loading.lengths import RankGroup
from zoo.data.loading.sample_source import SampleSource
from zoo.data.sample import MicroBatch
from zoo.errors import ConfigError, UserError
from zoo.logging.predictions_plot import Prediction
from zoo.parallel.world import World
from zoo.rollouts.advantages import AdvantageRule
from zoo.rollouts.batches import Answer, AnswerPacker
from zoo.rollouts.engine import Rollout, RolloutEngine, RolloutPrompt
from zoo.rollouts.prompts import PromptStream
from zoo.rollouts.rewards.rewards import Rewards, Scores
from zoo.types import JsonObject


class Answerer(Protocol):
    """Answers held-out rows; `zoo.rollouts.evaluation.HeldOutAnswers` is one."""

    def __call__(self, held_out: SampleSource, proceed: Callable[[], bool]) -> tuple[JsonObject, list[Prediction]]: ...


@dataclass(frozen=True)
class Connections:
    """What a rollout needs of the run, once the model is built."""

    engine: RolloutEngine
    rewards: Rewards
    passes: Sequence[Callable[[Sequence[MicroBatch]], list[MicroBatch]]]  # give micro-batches their log-probabilities
    replay: bool  # training takes the experts that the rollout took
    tick: Callable[[], None]  # a sign of life
    answerer: Answerer  # gives metrics of held-out rows
    reward_model: Callable[[Sequence[Rollout]], list[float]] | None = (
        None  # scores a replica's answers on all of its ranks
    )


@dataclass(frozen=True)
class Group:
    """The answers to one prompt, as all ranks know them."""

    number: int  # of the prompt
    rewards: list[list[float]]  # (G, R)
    lengths: list[int]
    finished: list[bool]


def together[T](group: RankGroup, find: Callable[[], T]) -> T:
    """What `find` returns on this rank; the first UserError of any rank of the group is raised on all of them."""
    failure: UserError | None = None
    try:
        result = find()
    except UserError as error:
        failure = error
    for of_rank in group.gather(failure):
        if of_rank is not None:
            raise of_rank
    return result


@dataclass(frozen=True)
class Sampled:
    """Answers on their way to their rewards."""

    numbers: list[int]  # of the prompts of all replicas
    rollouts: list[Rollout]  # of this one
    scores: Future[Scores]
    step: int  # updates that the weights had seen


class RolloutLoader:
    """Micro-batches of this rank, one optimizer update after the other, of answers that the model in training gives.

    It has the part of `BatchLoader`'s interface that a trainer uses. `metrics` are those of the rollout whose update was handed out last.
    """

    short_step: int | None = None
    total_steps: int | None = None  # the schedule goes by the recipe's steps
    exact = True

    def __init__(self, source: SampleSource, recipe: Recipe, world: World, group: RankGroup, *, most: int) -> None:
        """`group`: all ranks; `most`: positions that the model was made for.

        Raises:
            UserError: data.train has a stream.
        """
        if source.rows.has_stream:
            raise UserError(
                "data.train: prompts are not drawn from a stream; read it as a table, or leave stream out of its entry"
            )
        self.source, self.recipe, self.world, self.group = source, recipe, world, group
        self.prompts = PromptStream(source, recipe, group, most=most)
        self.bins_per_step = recipe.train.global_batch
        self.step = 0
        self.metrics: JsonObject = {}
        self._scorer = ThreadPoolExecutor(1, "zoo-rewards")
        self._failures: Counter[str] = Counter()  # of rewards' functions, in this rollout
        self._sampled_ahead: Sampled | None = None
        self._position: JsonObject = {}  # of the prompts before these
        self._pending: deque[list[MicroBatch]] = deque()
        self._connections: Connections | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def answerer(self) -> Answerer | None:
        """What gives metrics of held-out rows; None before it is connected."""
        return None if self._connections is None else self._connections.answerer

    @property
    def ready_ahead(self) -> bool:
        """Whether the next step may be fetched before this one's update: it is of the same rollout."""
        return bool(self._pending)

    @property
    def within_rollout(self) -> bool:
        """Whether updates of the last rollout are still to come, so that a run can't be resumed from here."""
        return bool(self._pending)

    @property
    def unlabelled(self) -> str:
        """Why the step that was handed out last has no token to learn, if it has none."""
        groups, kept = self.metrics["groups"], self.metrics.get("groups_kept")
        if kept is None:
            return "all its answers were cut, and rl.mask_truncated leaves them out; raise rl.max_new_tokens"
        rounds = self.recipe.rl.dynamic_sampling
        return (
            f"answers to {kept} of {groups} prompts in {rounds} rounds (rl.dynamic_sampling) have different rewards; take prompts that are "
            "neither too easy nor too hard, rewards with more levels, or more rl.samples"
        )

    def begin(self) -> None:
        """Nothing is prepared ahead."""

    def connect(self, connections: Connections) -> None:
        """Take what generates and what scores."""
        self._connections = connections
        self._packer = AnswerPacker(self.recipe, self.source.processor, replay=connections.replay)

    def next_step(self) -> list[MicroBatch]:
        """This rank's micro-batches of the next update, at least one; every rank calls it."""
        if not self._pending:
            self._seconds.clear()
            sampled, self._sampled_ahead = self._sampled_ahead or self._sample(self.recipe.train.global_batch), None
            steps = self._rollout(sampled)
            if self._goes_ahead():
                self._position = self.prompts.state_dict()
                self._sampled_ahead = self._sample(self.recipe.train.global_batch)
            assert self._connections is not None
            for logprobs in self._connections.passes:
                with self._timed("logprobs"):
                    steps = [logprobs(batches) for batches in steps]
            self._pending.extend(steps)
            self.metrics |= {f"{name}_seconds": round(seconds, 4) for name, seconds in self._seconds.items()}
        else:
            self.metrics = {name: value for name, value in self.metrics.items() if not name.endswith("_seconds")}
        self.step += 1
        return self._pending.popleft()

    def state_dict(self) -> JsonObject:
        """Plain values from which another loader goes on behind the last rollout; the same on every rank."""
        position = self.prompts.state_dict() if self._sampled_ahead is None else self._position
        return {"step": self.step, "rows": len(self.source), "seed": self.recipe.run.seed, **position}

    def load_state_dict(self, state: JsonObject, sizes: list[int | None] | None = None) -> None:
        """Go on from a saved state; `sizes`: given where rows have been added since."""
        same = state["rows"] == len(self.source) or sizes is not None
        if not same or state["seed"] != self.recipe.run.seed:
            raise ConfigError(
                f"The checkpoint's data had {state['rows']} rows and run.seed {state['seed']}; now there are {len(self.source)} rows and seed "
                f"{self.recipe.run.seed}. Resume with the same, or begin anew with run.accept_changes=[data.train,run.seed]."
            )
        self.step = state["step"]
        self.prompts.load_state_dict(state)

    def begin_anew(self, step: int) -> None:
        """Begin with the data anew, and count steps from `step` on."""
        self.step = step

    def steps_for_epochs(self, epochs: float) -> int:
        """Updates of a run of so many epochs, from its beginning; rounds of dynamic sampling take further rows."""
        return math.ceil(len(self.source) * epochs / self.recipe.train.global_batch) * self.recipe.rl.updates

    def abandon(self) -> None:
        """Let go of the model, and leave off reading rows."""
        self._connections = self._sampled_ahead = None
        self._pending.clear()
        self.source.abandon()

    def close(self) -> None:
        """Free the engine, and end the processes of rewards."""
        self._scorer.shutdown(wait=True, cancel_futures=True)
        if self._connections is not None:
            self._connections.engine.close()
            self._connections.rewards.close()
        self.source.close()

    def _goes_ahead(self) -> bool:
        """Whether the next rollout is sampled now, by the weights before this one's updates: not where a run may be resumed behind them."""
        rl, train = self.recipe.rl, self.recipe.train
        behind, last = self.step + rl.updates, train.steps or self.steps_for_epochs(train.epochs or 1.0)
        return bool(rl.ahead) and behind < last and not (train.save_every and behind % train.save_every == 0)

    def _rollout(self, sampled: Sampled) -> list[list[MicroBatch]]:
        """The micro-batches of rl.updates updates, without log-probabilities of further passes."""
        rl, wanted = self.recipe.rl, self.recipe.train.global_batch
        every: list[Group] = []
        kept: list[Group] = []
        local_answers: dict[int, list[Answer]] = {}
        self._failures.clear()
        for _ in range(max(1, rl.dynamic_sampling or 0)):
            if len(kept) == wanted:
                break
            groups, rollouts = self._scored(sampled if not every else self._sample(wanted - len(kept)))
            advantages = self._rule()(*self._table(groups))
            for at, group in enumerate(groups):
                if not rl.dynamic_sampling or bool(advantages.informative[at]):
                    kept.append(group)
                    facts = zip(advantages.values[at].tolist(), advantages.trained[at].tolist(), strict=True)
                    answers = zip(rollouts.get(group.number, []), facts, strict=False)
                    local_answers[group.number] = [Answer(rollout, *fact) for rollout, fact in answers]
            every += groups
        self.metrics = self._metrics(every, kept)
        if rl.ahead:
            self.metrics["lag"] = self.step - sampled.step
        return self._packed(kept, local_answers)

    def _sample(self, count: int) -> Sampled:
        """Answers to the next `count` prompts, whose rewards are being computed in a thread."""
        assert self._connections is not None
        engine, rewards = self._connections.engine, self._connections.rewards
        prompts = self.prompts.take(count, self.world.dp_rank, self.world.dp_size)
        local_prompts: list[RolloutPrompt] = [prompt for prompt in prompts.values() if prompt is not None]
        with self._timed("sync"):
            engine.wake()
            engine.update_weights()
        with self._timed("rollout"):
            rollouts = engine.generate(local_prompts, self.recipe.rl.samples)
        with self._timed("sync"):
            engine.sleep()
        of_model: list[float] = []
        if self._connections.reward_model is not None:
            with self._timed("rewards"):
                of_model = self._connections.reward_model(rollouts)
        scored = (rollouts, of_model) if self.world.counts_data else ([], [])  # by one rank of a replica
        return Sampled(list(prompts), rollouts, self._scorer.submit(rewards.score, *scored), self.step)

    def _scored(self, sampled: Sampled) -> tuple[list[Group], dict[int, list[Rollout]]]:
        """Sampled answers as all ranks know them, and this replica's by prompt."""
        with self._timed("rewards"):
            values, failures = together(self.group, sampled.scores.result)
            scores = iter(values.tolist())
        local: dict[int, list[Rollout]] = {}
        for rollout in sampled.rollouts:
            local.setdefault(rollout.prompt.number, []).append(rollout)
        facts: dict[int, Group] = {}
        if self.world.counts_data:
            for number, answers in local.items():
                lengths = [len(answer.token_ids) for answer in answers]
                facts[number] = Group(number, [next(scores) for _ in answers], lengths, [a.finished for a in answers])
        everyone: dict[int, Group] = {}
        for groups, failed in self.group.gather((facts, failures)):
            everyone |= groups
            for name, count in failed.items():
                self._failures[name] += count
        return [everyone[number] for number in sampled.numbers], local

    def _rule(self) -> AdvantageRule:
        rl = self.recipe.rl
        return AdvantageRule(
            str(rl.algorithm), bool(rl.std_norm), rl.max_new_tokens, rl.overlong_buffer or 0, rl.mask_truncated
        )

    def _table(self, groups: Sequence[Group]) -> tuple[Tensor, Tensor, Tensor]:
        """(P, G) rewards, lengths and whether answers have ended."""
        assert self._connections is not None
        weights = torch.tensor(list(self._connections.rewards.weights.values()), dtype=torch.float64)
        rewards = torch.tensor([group.rewards for group in groups], dtype=torch.float64) @ weights
        return rewards, torch.tensor([g.lengths for g in groups]), torch.tensor([g.finished for g in groups])

    def _packed(self, kept: Sequence[Group], local_answers: Mapping[int, list[Answer]]) -> list[list[MicroBatch]]:
        """The groups in equal parts, one an update, in packed micro-batches, as many on each rank."""
        updates, parts = self.recipe.rl.updates, list[list[Answer]]()
        for update in range(updates):
            groups = kept[len(kept) * update // updates : len(kept) * (update + 1) // updates]
            parts.append([answer for group in groups for answer in local_answers[group.number]])
        bins = [self._packer.bins(part) for part in parts]
        facts = [(len(b), self._packer.weight(part)) for b, part in zip(bins, parts, strict=True)]
        everyone = self.group.gather((self.world.dp_rank, facts))
        by_replica = [dict(everyone)[replica] for replica in range(self.world.dp_size)]
        unit = self.recipe.parallel.pp if self.recipe.parallel.vpp > 1 else 1
        steps: list[list[MicroBatch]] = []
        for update, (part, planned) in enumerate(zip(parts, bins, strict=True)):
            most = max(1, *(of_rank[update][0] for of_rank in by_replica))
            batches = self._packer.batches(part, planned, -(-most // unit) * unit)
            weight = math.fsum(of_rank[update][1] for of_rank in by_replica)
            totals = self.group.gather([batch.total for batch in batches])
            steps.append(with_most_tokens([replace(batch, step_weight=weight) for batch in batches], totals))
        return steps

    def _metrics(self, groups: Sequence[Group], kept: Sequence[Group]) -> JsonObject:
        """Metrics of a rollout over all ranks."""
        assert self._connections is not None
        rewards, lengths, finished = self._table(groups)
        metrics: JsonObject = {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std(dim=1).mean()),  # within a group
        }
        for at, name in enumerate(self._connections.rewards.weights):
            values = torch.tensor([[answer[at] for answer in group.rewards] for group in groups], dtype=torch.float64)
            metrics |= {f"reward/{name}": float(values.mean()), f"reward_std/{name}": float(values.std(dim=1).mean())}
        same = (rewards == rewards[:, :1]).all(dim=1)
        return metrics | {
            "answer_tokens": float(lengths.double().mean()),
            "answers_cut": float((~finished).double().mean()),
            "equal_groups": float(same.double().mean()),
            "groups": len(groups),
            **({"groups_kept": len(kept)} if self.recipe.rl.dynamic_sampling else {}),
            "rollout_tokens": int(lengths.sum()),
            **{f"reward_failures/{name}": count for name, count in self._failures.items()},
        }

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds[name] += time.monotonic() - began
        assert self._connections is not None
        self._connections.tick()
