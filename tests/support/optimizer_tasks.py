"""What ranks of `support.pool` do to compare zoo's AdamW with megatron-core's own optimizer around PyTorch's."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from support.rank_gradients import reduced_as_on_a_gpu


@contextmanager
def separate_masters(away: bool) -> Iterator[None]:
    """Optimizers built and stepped here are megatron-core's: fp32 copies of bf16 weights, PyTorch's AdamW.

    Args:
        away: weights are the copies rounded with ties away from zero, where megatron-core rounds ties to even.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from zoo.nn.adamw.state import split
    from zoo.parallel.megatron import inner_optimizer

    def round_away(optimizer: Any) -> None:
        for group in zip(optimizer.shard_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True):
            for weight, master in zip(*group, strict=True):
                weight.data.copy_(split(master.detach())[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inner_optimizer, "build", lambda config, inner, make: make())
        if away:
            patch.setattr(DistributedOptimizer, "_copy_main_params_to_model_params", round_away)
        yield


def follow(rank: int, size: int, overrides: tuple[str, ...], steps: int, how: str) -> tuple[list[float], list[str]]:
    """This rank's loss and a digest of its weights in each step of a run, whose batches are random.

    Args:
        how: "zoo", or "separate" or "separate, away" for megatron-core's optimizer (`separate_masters`).
    """
    if how == "zoo":
        return _follow(size, overrides, steps)
    with separate_masters(away=how.endswith("away")):
        return _follow(size, overrides, steps)


def _follow(size: int, overrides: tuple[str, ...], steps: int) -> tuple[list[float], list[str]]:
    losses, digests = [], []
    with _running("qwen3_vl_sft", "tiny", size, overrides) as run:
        for _ in range(steps):
            losses.append(_step(run))
            digests.append(digest([p for chunk in run.trainable.chunks for p in chunk.parameters()]))
    return losses, digests


@contextmanager
def _running(
    recipe_name: str,
    model_size: str,
    size: int,
    overrides: Sequence[str],
    build_in: AbstractContextManager[Any] | None = None,
) -> Iterator[Any]:
    """A built run of the CPU on one of `size` ranks, ended behind the block. `build_in`: a context to build and run it in."""
    from support.recipes import load_effective
    from zoo.config.validate import validate
    from zoo.logging.startup_time import Startup
    from zoo.parallel.signals import interrupts
    from zoo.parallel.world import open_world
    from zoo.training.trainer import Trainer

    fixed = [f"size={model_size}", "hardware=cpu", "engine.threads=1", "train.steps=1000", "train.eval_rows=2"]
    recipe = validate(load_effective(recipe_name, [*fixed, *overrides]), size)
    with interrupts() as stop, open_world(recipe) as here, build_in or nullcontext():
        run = Trainer(recipe, here, stop, Startup("imports"))
        run.build()
        yield run
        run.loader.close()


def _step(run: Any) -> float:
    """One step of a run, with megatron-core's own `step` of its optimizer; this rank's sum of losses."""
    for chunk in run.trainable.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    run.trainable.optimizer.zero_grad()
    found = run.forward_backward(run.fetch(), 1.0)
    run.trainable.scheduler.step(increment=1)
    run.trainable.optimizer.step()
    return sum(float(one["nll"]) for one in found)


def digest(tensors: list[Tensor]) -> str:
    """SHA-256 of the tensors' bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@dataclass(frozen=True)
class Rectangle:
    """What a rank holds of a tensor of a checkpoint, whose whole shape is `shape`."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor


def held(
    rank: int, size: int, overrides: tuple[str, ...], recipe_name: str, model_size: str, steps: int = 0, bucket: int = 0
) -> list[Rectangle]:
    """What a rank would write, weights and optimizer state, at the start of a run, or where it resumes, and so many steps on.

    Args:
        bucket: if any, gradients are reduced during the backward pass, as on a GPU, so many at once.
    """
    from zoo.checkpoint.sharded_state import to_write
    from zoo.optim import adamw

    as_on_a_gpu = reduced_as_on_a_gpu(bucket) if bucket else None
    with _running(recipe_name, model_size, size, overrides, as_on_a_gpu) as run:
        for _ in range(steps):
            _step(run)
        adamw.allocate_state(run.trainable.optimizer)
        pieces = to_write(run.trainable, run.world).pieces
    return [Rectangle(p.key, p.shape, p.offsets, p.read().detach().clone().view(p.sizes)) for p in pieces]


def assembled(ranks: Sequence[Sequence[Rectangle]]) -> dict[str, Tensor]:
    """The whole tensors of what all ranks hold; every element is held once."""
    found: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for one in (one for each in ranks for one in each):
        whole = found.setdefault(one.key, torch.zeros(one.shape, dtype=one.values.dtype))
        place = tuple(slice(o, o + n) for o, n in zip(one.offsets, one.values.shape, strict=True))
        whole[place] = one.values
        counts[one.key] = counts.get(one.key, 0) + one.values.numel()
    assert counts == {key: whole.numel() for key, whole in found.items()}
    return found


@dataclass(frozen=True)
class SharedOut:
    """A step of a model whose experts two ranks share out."""

    gathered: list[int]  # how often each bucket of weights is gathered
    weights: str  # a digest of the weights that both ranks have
    moved: float  # the largest change of one of them
    # Exchanges that are planned: "ExchangeWithAll" for a forward pass, "ExchangeByChoice" for one layer.
    exchanges: dict[str, int]
    asked: int  # exchanges between ranks to plan one
    tokens: list[tuple[int, int]]  # of this rank, and of the one that has most, in each plan that sends to all


def share_out(rank: int, size: int, overrides: tuple[str, ...]) -> SharedOut:
    """One step of the smallest model with experts."""
    from megatron.core.distributed import param_and_grad_buffer

    from zoo.nn.decoder.experts import exchange, layer

    calls: Counter[int] = Counter()
    planned: Counter[str] = Counter()
    tokens: list[tuple[int, int]] = []
    plain = param_and_grad_buffer.dist_all_gather_func

    def gather(whole: Tensor, part: Tensor, **keys: Any) -> Any:
        calls[whole.data_ptr()] += 1
        return plain(whole, part, **keys)

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            planned[name] += 1
            found = function(*args)
            if isinstance(found, layer.ExchangeWithAll):
                tokens.append((len(found.places), found.most))
            return found

        return call

    with _running("qwen3_vl_moe_sft", "tiny-moe", size, overrides) as run, pytest.MonkeyPatch.context() as patch:
        shared = [p for p in run.trainable.chunks[0].parameters() if getattr(p, "allreduce", True)]
        before = [p.detach().clone() for p in shared]
        patch.setattr(param_and_grad_buffer, "dist_all_gather_func", gather)
        for kind, plan in ((layer.ExchangeByChoice, "from_choices"), (layer.ExchangeWithAll, "from_count")):
            patch.setattr(kind, plan, counted(kind.__name__, getattr(kind, plan)))
        patch.setattr(exchange, "_gather", counted("asked", exchange._gather))
        _step(run)
        moved = max(float((p - was).abs().max()) for p, was in zip(shared, before, strict=True))
        asked = planned.pop("asked", 0)
        return SharedOut([*calls.values()], digest(shared), moved, dict(planned), asked, tokens)


class Streams:
    """Stands in for torch in `zoo.parallel.weight_gathering`, and notes what waits for what, as a GPU's streams would."""

    def __init__(self) -> None:
        self.on_the_way: set[Any] = set()  # events that were recorded and that nobody has waited for
        self.cuda = self

    def is_available(self) -> bool:
        return True

    def Stream(self) -> Streams:
        return self

    def current_stream(self) -> Streams:
        return self

    def stream(self, _: Any) -> Any:
        return nullcontext()

    def Event(self) -> Any:
        class Event:
            def record(event, _: Any) -> None:
                self.on_the_way.add(event)

        return Event()

    def wait_event(self, event: Any) -> None:
        self.on_the_way.discard(event)

    def wait_stream(self, _: Any) -> None:
        self.on_the_way.clear()


@dataclass(frozen=True)
class Ahead:
    """A forward pass whose weights are gathered meanwhile."""

    groups: int  # of buckets
    at_first_layer: int  # groups that are on their way when the decoder begins
    early: list[str]  # modules that were called before their weights had come
    behind: int  # groups that nothing has waited for by the end
    behind_save: int  # the same, after an update and a save


def gather_ahead(rank: int, size: int, overrides: tuple[str, ...]) -> Ahead:
    """A step, a forward and backward pass, and the save behind a second step, on streams that are noted."""
    from zoo.checkpoint.sharded_state import to_write
    from zoo.parallel import weight_gathering

    streams, early, begun = Streams(), [], []
    as_on_a_gpu = ExitStack()
    as_on_a_gpu.enter_context(reduced_as_on_a_gpu(20_000))
    patch = as_on_a_gpu.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(weight_gathering, "torch", streams)
    more = ("parallel.overlap_param_gather=true", *overrides)
    with _running("qwen3_vl_sft", "tiny", size, more, as_on_a_gpu) as run:
        (chunk,) = run.trainable.chunks
        (gathering,) = (one for one in weight_gathering._gatherings if one.ahead)

        def check(name: str, weights: list[Tensor], *_: Any) -> None:
            groups = {chunk.param_to_bucket_group[one] for one in weights if one in chunk.param_to_bucket_group}
            if any(gathering._arrivals[group] in streams.on_the_way for group in groups):
                early.append(name)

        model = chunk.module
        layers = [*model.decoder.layers, *model.vision.blocks]
        of_layers = {weight for layer in layers for weight in layer.parameters()}
        within = {module for layer in layers for module in layer.modules()}
        for name, module in model.named_modules():
            weights = [one for one in module.parameters() if module in within or one not in of_layers]
            module.register_forward_pre_hook(partial(check, name, weights))
        model.decoder.layers[0].register_forward_pre_hook(lambda *_: begun.append(len(streams.on_the_way)))
        _step(run)
        begun.clear()
        chunk.zero_grad_buffer()
        run.forward_backward(run.fetch(), 1.0)
        behind = len(streams.on_the_way)
        _step(run)
        assert streams.on_the_way, "a save has something to wait for"
        to_write(run.trainable, run.world)
        return Ahead(len(gathering._arrivals), begun[0], early, behind, len(streams.on_the_way))


@dataclass(frozen=True)
class Parts:
    """What a rank holds after so many steps."""

    digests: dict[tuple[str, int, int, int], str]  # by name, tensor, expert and expert tensor parallel rank
    copied: bool  # whether its stage has a copy of another one's weight
    stateless: int  # elements of parameters that are trained, of which this rank has a range, and no state of it


def parts(rank: int, size: int, overrides: tuple[str, ...], recipe_name: str, model_size: str, steps: int) -> Parts:
    """Digests of this rank's parameters after so many steps; ranks that hold the same part have the same key."""
    from zoo.bridge.parallel import ShardInfo, model_parameters
    from zoo.parallel.megatron.inner_optimizer import held_ranges

    with _running(recipe_name, model_size, size, overrides) as run:
        for _ in range(steps):
            _step(run)
        info, digests, copied, stateless = ShardInfo.from_groups(run.world.groups), {}, False, 0
        states = {
            held.parameter: bool(one.optimizer.state.get(held.part))
            for one in run.trainable.optimizer.chained_optimizers
            if not one.is_stub_optimizer
            for held in held_ranges(one)
        }
        for name, parameter in model_parameters(run.trainable.chunks):
            shared = getattr(parameter, "shared_embedding", False)
            copied = copied or (shared and run.world.pp_rank > 0)
            stateless += parameter.numel() * (states.get(parameter) is False)
            name = "shared" if shared else name
            cut = getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "partition_dim", -1) >= 0
            experts = ".experts." in name
            place = (info.ep_rank, info.etp_rank) if experts else (0, 0)
            digests[name, info.tp_rank if cut and not experts else 0, *place] = digest([parameter])
        return Parts(digests, copied, stateless)
