"""What a loop of reinforcement learning does with `zoo.Engine`, and the same with transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.matrix import Model
from support.rank_gradients import Held

NOT_MEDIA = ("input_ids", "attention_mask", "use_audio_in_video", "mm_token_type_ids", "token_type_ids")
CLIP, BONUS = 0.2, 0.01
BUCKET = 50_000  # bytes: a layer's weights are several, the embedding is larger than one


def engine_recipe(folder: Path | str, model: Model, *overrides: str) -> Any:
    """The recipe of a model of the matrix, on the CPU with one thread."""
    from support.recipes import load_effective

    fixed = ["hardware=cpu", "engine.threads=1", f"model.init={folder}", "train.steps=4", "train.schedule=constant"]
    return load_effective(model.recipe, [*fixed, *model.overrides, *overrides])


def loop_examples(folder: Path | str, model: Model) -> list[Any]:
    """The rows of the matrix, through the model's processor."""
    from support.engine import recipe_for
    from zoo.model.build import assemble

    made = model.examples(assemble(recipe_for(folder, recipe=model.recipe)).processor)
    return [made[name] for group in model.groups for name in group]


def loop_batch(examples: Sequence[Any], side: str = "mixed", extra: int = 3) -> dict[str, Any]:
    """A padded batch as a loop has it, with advantages, and log-probabilities of an earlier policy that are none."""
    from support.engine import padded_batch

    padded = padded_batch([example.sample for example in examples], side, extra, fill=1)
    draw = torch.Generator().manual_seed(len(examples))
    shape = padded.input_ids.shape
    media = [{name: value for name, value in example.features.items() if name not in NOT_MEDIA} for example in examples]
    assert padded.attention_mask is not None and padded.labels is not None
    return {
        "input_ids": padded.input_ids,
        "attention_mask": padded.attention_mask,
        "loss_mask": (padded.labels != -100).long(),
        "media": [one or None for one in media],
        "advantages": torch.randn(len(examples), 1, generator=draw).expand(shape).clone(),
        "noise": 0.3 * torch.randn(shape, generator=draw),
        "names": [example.name for example in examples],
        "about": "not cut into rows",
    }


def grpo(logprobs: Tensor, batch: Mapping[str, Any], entropy: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
    """The sum of PPO's clipped loss (arXiv 1707.06347, eq. 7), of an earlier policy near this one, over the chosen tokens."""
    assert logprobs.shape == batch["input_ids"].shape and len(batch["names"]) == len(logprobs)
    assert batch["about"] == "not cut into rows"
    mask = batch["loss_mask"].bool() & (logprobs != 0)
    ratio = (logprobs - (logprobs.detach() + batch["noise"])).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.minimum(ratio * batch["advantages"], clipped * batch["advantages"])
    if entropy is not None:
        loss = loss - BONUS * entropy
    return loss[mask].sum(), {"clipped": (ratio != clipped)[mask].sum(), "rows": len(logprobs)}


@dataclass
class Reference:
    """transformers' values of a batch, row by row, in the batch's shape."""

    logprobs: Tensor
    entropy: Tensor


def hf_values(hf: Any, examples: Sequence[Any], batch: Mapping[str, Any], temperature: float = 1.0) -> Reference:
    """The same from transformers, differentiable: at each token of a row but the first."""
    logprobs, entropy = [], []
    for example, mask in zip(examples, batch["attention_mask"], strict=True):
        logits = hf(**example.features).logits[0].float() / temperature
        every = logits.log_softmax(-1)[:-1]
        ids = example.features["input_ids"][0]
        at = mask.bool().nonzero()[1:, 0]
        zeros = torch.zeros(len(mask))
        logprobs.append(zeros.index_copy(0, at, every.gather(1, ids[1:, None])[:, 0]))
        entropy.append(zeros.index_copy(0, at, -(every.exp() * every).sum(-1)))
    return Reference(torch.stack(logprobs), torch.stack(entropy))


@dataclass(frozen=True)
class LoopPlan:
    """What `run_loop` does: each replica takes its share of the rows."""

    folder: str
    model: str  # of support.matrix.MODELS
    batch: str  # a file that torch.load reads: the batch of all replicas
    overrides: tuple[str, ...] = ()
    temperature: float = 1.0
    joined: bool = False  # torch.distributed is the caller's


@dataclass
class Looped:
    """What a rank has of it."""

    rows: list[int]
    logprobs: Tensor
    entropy: Tensor
    held: Held
    outcome: Any
    after: Tensor  # log-probabilities after an update
    routing: Tensor | None  # of each token before the update, sorted; None where the model has no experts
    replayed: Tensor  # log-probabilities after the update by that routing
    misplaced: list[str]  # published tensors that the ranks' blocks do not make up
    wrong: list[str]  # published tensors that differ from those of an export, to the bit
    peak: int  # bytes that a stream of the weights held at most
    largest: int  # bytes of its largest tensor


def rows_of(batch: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Some rows of a batch."""
    size = len(batch["input_ids"])
    return {
        name: value[torch.tensor(rows)]
        if isinstance(value, Tensor)
        else [value[row] for row in rows]
        if isinstance(value, list) and len(value) == size
        else value
        for name, value in batch.items()
    }


def run_loop(rank: int, size: int, plan: LoopPlan) -> Looped:
    """Log-probabilities, entropy, whole gradients of a loss, and an update, through `zoo.Engine`."""
    import torch.distributed as dist

    import zoo
    from support.matrix import MODELS

    c10d: Any = dist.distributed_c10d
    groups: set[Any] = set()
    whole = torch.load(plan.batch, weights_only=False)
    recipe = engine_recipe(plan.folder, MODELS[plan.model], *plan.overrides)
    if plan.joined:
        dist.init_process_group("gloo")
        groups = set(c10d._world.pg_map)
    with zoo.Engine.open(recipe) as engine:
        rows = list(range(len(whole["input_ids"])))[engine.dp_rank :: engine.dp_size]
        batch = rows_of(whole, rows)
        logprobs = engine.logprobs(batch, temperature=plan.temperature)
        entropy = engine.entropy(batch, temperature=plan.temperature)
        routing = None
        if engine._sparse is not None:
            same, routing = engine.logprobs_and_routing(batch, temperature=plan.temperature)
            torch.testing.assert_close(same, logprobs, rtol=0, atol=0)
        with whole_gradients():
            outcome = engine.train_step(batch, grpo, temperature=plan.temperature, entropy=True, update=False)
        held = held_by(engine)
        engine.train_step(batch, grpo, temperature=plan.temperature, entropy=True)
        after = replayed = engine.logprobs(batch, temperature=plan.temperature)
        if routing is not None:
            replayed, again = engine.logprobs_and_routing({**batch, "routing": routing}, temperature=plan.temperature)
            torch.testing.assert_close(
                again.sort().values, routing.sort().values, rtol=0, atol=0, msg="replay took other experts: {}".format
            )
            engine.train_step({**batch, "routing": routing}, grpo, update=False)
            routing = routing.sort().values
        wrong = differing(engine, Path(f"{plan.batch}.{size}.{'-'.join(plan.overrides).replace('/', '')}"))
        misplaced = not_made_up(engine)
        peak, largest = stream_bytes(engine)
    if plan.joined:
        assert set(c10d._world.pg_map) == groups
        dist.destroy_process_group()
    return Looped(rows, logprobs, entropy, held, outcome, after, routing, replayed, misplaced, wrong, peak, largest)


@dataclass
class FewRows:
    """What a rank has of answers to fewer rows than there are replicas, and of a step that learns them."""

    shape: tuple[int, ...]  # of its batch
    logprobs: Tensor
    outcome: Any
    after: Tensor  # log-probabilities of all answers after the step, the same on all ranks
    empty: Any  # what a step came to in which no replica had a row


def run_few_rows(rank: int, size: int, recipe: str, overrides: tuple[str, ...]) -> FewRows:
    """One question answered twice on all ranks, whatever the number of replicas."""
    import zoo
    from support.recipes import load_effective

    fixed = ("size=tiny", "hardware=cpu", "engine.threads=1", "train.lr=1e-3", "packing.budget=24")
    rows = [{"messages": [{"role": "user", "content": "Say 3"}]}]
    with zoo.Engine.open(load_effective(recipe, [*fixed, *overrides])) as engine:
        assert len(engine.generate([], max_new_tokens=3).batch["input_ids"]) == 0
        batch = engine.generate(rows, samples=2, max_new_tokens=3).batch
        batch["advantages"] = torch.arange(1.0, len(batch["input_ids"]) + 1)

        def loss(logprobs: Tensor, part: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
            return -(logprobs * part["advantages"][:, None]).sum(), {"rows": len(logprobs)}

        logprobs = engine.logprobs(batch, temperature=torch.ones(len(batch["input_ids"])))
        assert engine.entropy(batch).shape == logprobs.shape
        if engine._sparse is not None:
            same, routing = engine.logprobs_and_routing(batch)
            torch.testing.assert_close(same, logprobs, rtol=0, atol=0)
            batch["routing"] = routing
        outcome = engine.train_step(batch, loss)
        none = {name: value[:0] for name, value in batch.items()}
        empty = engine.train_step(none, loss)
        every = engine.generate(rows * engine.dp_size, samples=2, max_new_tokens=3, temperature=0.0).batch
        return FewRows(tuple(batch["input_ids"].shape), logprobs.cpu(), outcome, engine.logprobs(every).cpu(), empty)


def differing(engine: Any, folder: Path) -> list[str]:
    """Names of the engine's published tensors that are not those of an export, or that it lacks."""
    from support.weights import tensors
    from zoo.checkpoint.export import export
    from zoo.parallel.world import settings

    found = dict(engine.hf_weights(bucket=BUCKET))
    parts = engine._parts
    with settings(engine.recipe):
        export(list(parts.chunks), folder, parts.assembly, engine._world, parts.assembly.source)
    wanted = tensors(folder)
    bridge = parts.assembly.family.load("bridge")
    left = [name for name in wanted.keys() - found.keys() if bridge.zoo_name(name) and "mtp." not in name]
    unequal = [name for name, tensor in found.items() if name not in wanted or not wanted[name].equal(tensor)]
    return sorted(left + unequal)


def not_made_up(engine: Any) -> list[str]:
    """Names of published tensors that are not, element by element, the blocks that count of all ranks."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        everyone, [replace(one, tensor=one.tensor.clone()) for one in engine.hf_shards() if one.first]
    )
    wanted = {name: tensor.clone() for name, tensor in engine.hf_weights()}
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in wanted.items()}
    twice = []
    for one in (shard for shards in everyone for shard in shards):
        place = tuple(slice(at, at + size) for at, size in zip(one.offset, one.tensor.shape, strict=True))
        if one.full_shape != tuple(wanted[one.name].shape) or not found[one.name][place].isnan().all():
            twice.append(one.name)
        found[one.name][place] = one.tensor
    return sorted({*twice, *(name for name, tensor in wanted.items() if not torch.equal(found[name], tensor))})


def stream_bytes(engine: Any) -> tuple[int, int]:
    """(most bytes that a stream of the weights held at once, bytes of its largest tensor)."""
    from support.live import LiveBytes

    largest = 0
    with LiveBytes() as live:
        for _, tensor in engine.hf_weights(bucket=BUCKET):
            largest = max(largest, tensor.nbytes)
            del tensor
    return live.peak, largest


@contextmanager
def whole_gradients() -> Iterator[None]:
    """Each replica gets the whole gradient, not its slice alone."""
    from megatron.core import pipeline_parallel

    find = pipeline_parallel.get_forward_backward_func
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_parallel, "get_forward_backward_func", lambda: partial(find(), force_all_reduce=True))
        yield


def held_by(engine: Any) -> Held:
    """The gradients that a rank of an engine has, as `support.gathered` takes them."""
    from zoo.bridge.parallel import ShardInfo, model_parameters
    from zoo.model import build

    parts, world = engine._parts, engine._world
    parameters = model_parameters(parts.chunks)
    entries = parts.assembly.family.load("bridge").publish([name for name, _ in parameters])
    dims = build.model_dims(parts.assembly)
    return Held(
        loss=0.0,
        gradients={name: p.main_grad.clone() for name, p in parameters if p.requires_grad},
        shards={name: entry.rule.shard_for(dims) for name, entry in entries.items()},
        info=ShardInfo.from_groups(world.groups),
        pp_rank=world.pp_rank,
        dp_rank=world.dp_rank,
        cp_rank=world.cp_rank,
    )
