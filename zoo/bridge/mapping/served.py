"""LoRA adapters as vLLM loads them, out of PEFT's format (zoo.bridge.mapping.peft) and back to it.

vLLM translates the names of published weights, so modules have these names. Some of its models take experts as PEFT's pair of
stacks (`Bridge.stacked_adapters`), the others one pair of matrices for each projection of each expert. They want all projections:
those without an adapter have zeros here. PEFT loads both: it joins the experts of models that are published one by one.

PEFT names a stack by the module that it wraps: gate_up_proj by `experts.base_layer` and down_proj by `experts`; one that has an
adapter alone is `experts`, whichever it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zoo.bridge.mapping.peft import tensor_names
from zoo.errors import UserError
from zoo.types import JsonMapping, JsonObject

GATE_UP, DOWN = "gate_up_proj", "down_proj"  # parameters of a module of experts
_PROJECTIONS = {GATE_UP: ("gate_proj", "up_proj"), DOWN: ("down_proj",)}  # what they are in one expert

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM's max_lora_rank may be

type AdapterFormat = Literal["peft", "vllm"]
type Pair = tuple[Tensor, Tensor]
"""A (experts, rank, in) and B (experts, out, rank) of a stack."""
type Shape = tuple[int, ...]


def vllm_rank(rank: int) -> int | None:
    """The least max_lora_rank of vLLM for adapters of a rank; None where it takes none of that."""
    return next((size for size in RANKS if size >= rank), None)


def to_vllm(
    tensors: Mapping[str, Tensor], published: Mapping[str, str], stacks: Collection[str], experts: int, *, stacked: bool
) -> dict[str, Tensor]:
    """A whole model's adapters as vLLM loads them.

    Args:
        tensors: by PEFT's names.
        published: name of a module or parameter in transformers -> published one, of all that have an adapter.
        stacks: experts' parameters among them.
        experts: number of experts in a layer.
        stacked: whether vLLM's model takes experts as stacks.
    """
    linears = [name for name in published if name not in stacks]
    renamed = zip(_names(linears), _names(published[name] for name in linears), strict=True)
    made = {served: tensors[name] for name, served in renamed}
    for module, parts in _modules(stacks).items():
        names = {part: _stack(module, part, stacks) for part in parts}
        held = {part: _pair(tensors[a], tensors[b], experts) for part, (a, b) in names.items()}
        target = published[f"{module}.{parts[0]}"].rpartition(".")[0]
        for part, (a, b) in _with_zeros(held).items():
            if stacked:
                made |= zip(_both(target, part), (_flat_a(a), _flat_b(b)), strict=True)
            else:
                made |= _as_singles(target, part, a, b)
    return made


def vllm_config(
    config: JsonMapping, published: Mapping[str, str], stacks: Collection[str], *, stacked: bool
) -> JsonObject:
    """adapter_config.json of what `to_vllm` gives; `config` is PEFT's of the same adapters.

    vLLM reads rank and alpha in it. The modules are for PEFT, which joins experts where a name ends as one of theirs does.
    """
    modules = [published[name] for name in config["target_modules"]]
    parameters = [
        published[name.removesuffix(".weight")] + ".weight"
        for name in config["target_parameters"] or ()
        if name not in stacks
    ]
    if stacked:
        experts = {published[name].rpartition(".")[0] for name in stacks}
        parameters += [f"{module}.{part}" for module in experts for part in _PROJECTIONS]
    elif stacks:
        modules += [f"experts.{projection}" for projections in _PROJECTIONS.values() for projection in projections]
    return {**config, "target_modules": sorted(modules), "target_parameters": sorted(parameters) or None}


@dataclass(frozen=True)
class Stored:
    """A tensor in PEFT's format, made of those of a file."""

    shape: Shape
    names: Sequence[str]  # of the file's
    join: Callable[[Sequence[Tensor]], Tensor] = lambda tensors: tensors[0]


def stored_as(
    shapes: Mapping[str, Shape], published: Mapping[str, str], stacks: Collection[str]
) -> tuple[dict[str, Stored], list[str]]:
    """PEFT's tensors out of an adapter's file in either format, and names of the file's tensors that must be zero.

    A tensor of the file that is none of these keeps its name.

    Args:
        shapes: of the file's tensors.
        published: as in `to_vllm`.
        stacks: experts' parameters that have adapters here.
    """
    linears = [name for name in published if name not in stacks]
    known = dict(zip(_names(published[name] for name in linears), _names(linears), strict=True))
    known |= {name: name for name in _names(linears)}
    stored: dict[str, Stored] = {}
    zeros: list[str] = []
    used: set[str] = set()
    for module, parts in _modules(stacks).items():
        target = published[f"{module}.{parts[0]}"].rpartition(".")[0]
        for part, pair in _experts_in(shapes, (module, target), parts).items():
            used |= {name for tensor in pair for name in tensor.names}
            if part in parts:
                stored |= zip(_stack(module, part, stacks), pair, strict=True)
            else:
                zeros += pair[1].names
    rest = {known.get(name, name): Stored(shape, [name]) for name, shape in shapes.items() if name not in used}
    return rest | stored, zeros


def _names(modules: Iterable[str]) -> list[str]:
    """PEFT's names of the tensors of linears, A and B in turn."""
    return [name for pair in tensor_names(modules, ()) for name in pair]


def _modules(stacks: Collection[str]) -> dict[str, list[str]]:
    """The modules of these stacks, and which each has."""
    parts: dict[str, list[str]] = {}
    for name in sorted(stacks):
        module, _, part = name.rpartition(".")
        parts.setdefault(module, []).append(part)
    return parts


def _stack(module: str, part: str, stacks: Collection[str]) -> tuple[str, str]:
    """PEFT's names of a stack's A and B."""
    return tensor_names([f"{module}.{part}"], stacks)[0]


def _both(module: str, part: str) -> tuple[str, str]:
    """PEFT's names of a stack's A and B in a module where both stacks have an adapter."""
    return _stack(module, part, [f"{module}.{each}" for each in _PROJECTIONS])


def _pair(a: Tensor, b: Tensor, experts: int) -> Pair:
    return a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)


def _with_zeros(held: Mapping[str, Pair]) -> dict[str, Pair]:
    """Both stacks of a module, of which one may have no adapter."""
    (a, b), *_ = held.values()
    if GATE_UP in held:
        width = b.shape[1] // 2
        missing = a.new_zeros(*a.shape[:2], width), b.new_zeros(len(b), a.shape[2], b.shape[2])
        return {DOWN: missing, **held}
    missing = a.new_zeros(*a.shape[:2], b.shape[1]), b.new_zeros(len(b), 2 * a.shape[2], b.shape[2])
    return {GATE_UP: missing, **held}


def _as_singles(module: str, part: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    projections = _PROJECTIONS[part]
    made: dict[str, Tensor] = {}
    for expert in range(len(a)):
        for projection, rows in zip(projections, b[expert].chunk(len(projections)), strict=True):
            names = _names([f"{module}.{expert}.{projection}"])
            made |= dict(zip(names, (a[expert].contiguous(), rows.contiguous()), strict=True))
    return made


def _flat_a(a: Tensor) -> Tensor:
    return a.flatten(0, 1).contiguous()


def _flat_b(b: Tensor) -> Tensor:
    return b.permute(1, 2, 0).flatten(1).contiguous()


def _experts_in(
    shapes: Mapping[str, Shape], modules: Sequence[str], parts: Sequence[str]
) -> dict[str, tuple[Stored, ...]]:
    """A and B of the stacks of a module, by the name of the stack; `modules`: names that it may have, `parts`: its stacks with an adapter.

    A stack of which tensors are missing is left out.
    """
    for module in modules:
        if _both(module, DOWN)[0] in shapes:
            held = {part: _both(module, part) for part in _PROJECTIONS}
            if any(name not in shapes for pair in held.values() for name in pair):
                held = {parts[0]: _both(module, DOWN)} if len(parts) == 1 else {}
            if all(name in shapes for pair in held.values() for name in pair):
                return {part: tuple(Stored(shapes[name], [name]) for name in pair) for part, pair in held.items()}
        if pairs := {part: pair for part in _PROJECTIONS if (pair := _joined(shapes, module, part))}:
            return pairs
    return {}


def _joined(shapes: Mapping[str, Shape], module: str, part: str) -> tuple[Stored, ...] | None:
    """A and B of a stack whose experts stand one by one in the file; None where some are missing."""
    projections = _PROJECTIONS[part]
    count = next(e for e in itertools.count() if _names([f"{module}.{e}.{projections[0]}"])[0] not in shapes)
    names = [_names(f"{module}.{expert}.{projection}" for projection in projections) for expert in range(count)]
    if not count or any(name not in shapes for of_expert in names for name in of_expert):
        return None
    a_names, b_names = ([name for of_expert in names for name in of_expert[side::2]] for side in (0, 1))
    (rank, width), height = shapes[a_names[0]], sum(shapes[name][0] for name in b_names[: len(projections)])

    def join_a(tensors: Sequence[Tensor]) -> Tensor:
        by_projection = [torch.stack(list(tensors[first :: len(projections)])) for first in range(len(projections))]
        if any(not torch.equal(by_projection[0], other) for other in by_projection[1:]):
            title = (
                f"{module}: {' and '.join(projections)} have a lora_A each, where zoo's adapters of experts share one"
            )
            raise UserError(f"{title}; merge it into the weights, or adapt other modules")
        return _flat_a(by_projection[0])

    def join_b(tensors: Sequence[Tensor]) -> Tensor:
        rows = [
            torch.cat(list(tensors[first : first + len(projections)]))
            for first in range(0, len(tensors), len(projections))
        ]
        return _flat_b(torch.stack(rows))

    return Stored((count * rank, width), a_names, join_a), Stored((height, count * rank), b_names, join_b)
