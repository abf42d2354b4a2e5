"""LoRA adapters in PEFT's format: which linears a recipe's targets mean, their names, their tensors, their config.

Names are those of transformers' modules, as PEFT has them. A zoo weight stands for one linear there or for several (queries,
keys and values; gate and up), each with its own `lora_A` (rank, in) and `lora_B` (out, rank). On zoo's side there is one
`a` (parts * rank, in), their A one below the other, and one `b` (out, rank) with their rows in the weight's order
(zoo.nn.decoder.lora), which the weight's own transform makes. A part that is not targeted has zeros in `b`, and one of lower rank
than others in both. DoRA's `lora_magnitude_vector` (out,) is cut as B is.

Parts of a recipe's `lora.whole_parts` and a reward model's head are trained whole, beside the adapters: PEFT's `modules_to_save`.

Experts are a stacked parameter in transformers, which PEFT calls by `target_parameters`: `lora_A` (experts * rank, in), one
expert below the other, and `lora_B` (out, rank * experts) with the expert last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.bridge.errors import BridgeError
from zoo.bridge.mapping.peft_targets import EXPERTS_OF_OLD, PREFIX, SAME, Renames, Sizes, Target
from zoo.bridge.mapping.table import Bridge, Entry
from zoo.bridge.mapping.transforms import Dims
from zoo.errors import UserError, printable
from zoo.records import are_texts, is_count, is_number
from zoo.types import JsonMapping, JsonObject

ALL = "all-linear"  # every linear of the chosen parts, experts not among them, as in PEFT
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FOREIGN = ("lora_bias",)
_PATTERNS: dict[str, Callable[[Any], bool]] = {
    "rank_pattern": lambda rank: is_count(rank) and rank > 0,
    "alpha_pattern": lambda alpha: is_number(alpha) and alpha > 0,
}
_HEADS = ("classifier", "score")  # what PEFT saves of any model of task type SEQ_CLS


def candidates(zoo_names: Iterable[str], bridge: Bridge, config: JsonMapping) -> list[Target]:
    """The weights of those zoo names with their modules' names, nothing chosen yet."""
    targets = []
    for name, entry in bridge.publish(zoo_names).items():
        modules = tuple(parameter.removesuffix(".weight") for parameter in _in_memory(entry, bridge, config))
        published = tuple(parameter.removesuffix(".weight") for parameter in _published(entry))
        targets.append(Target(name, entry, modules, published, (False,) * len(modules)))
    return targets


def _published(entry: Entry) -> list[str]:
    """The published names of a weight's parameters, experts as a stack."""
    if entry.rule.stacked:
        (stack,) = [layout for layout in entry.rule.layouts if not layout.per_expert][:1]
        return stack.names(entry.binding)
    return entry.hf_names()


def _in_memory(entry: Entry, bridge: Bridge, config: JsonMapping) -> tuple[str, ...]:
    """The names of transformers' parameters that a weight is; experts are a stack."""
    return tuple(bridge.in_memory(name, config) for name in _published(entry))


@dataclass(frozen=True)
class Saved:
    """A zoo weight that an adapter's file holds whole, and PEFT's names of the tensors that it is there."""

    zoo: str
    entry: Entry
    names: tuple[str, ...]

    def to_peft(self, weight: Tensor, dims: Dims) -> dict[str, Tensor]:
        """PEFT's tensors by name."""
        tensors = self.entry.layout.transform.to_hf(weight, dims)
        return {name: tensor.contiguous() for name, tensor in zip(self.names, tensors, strict=True)}

    def to_zoo(self, tensors: Sequence[Tensor], dims: Dims) -> Tensor:
        """The weight: the inverse of `to_peft`."""
        return self.entry.layout.transform.to_zoo(list(tensors), dims)

    def shapes(self, shape: Sequence[int], dims: Dims) -> dict[str, tuple[int, ...]]:
        """Shapes of PEFT's tensors of a weight of that shape, by name."""
        shapes = self.entry.hf_shapes(shape, dims).values()
        return {name: tuple(hf_shape) for name, hf_shape in zip(self.names, shapes, strict=True)}


def modules_to_save(
    zoo_names: Collection[str], parts: Collection[str], trained: Collection[str], bridge: Bridge, config: JsonMapping
) -> tuple[list[str], list[Saved]]:
    """The transformers modules whose own parameters are trained, the outermost ones alone, and the weights in them.

    A parameter of a module that holds other parts of the model too (a `nn.Parameter` of the model itself) is in none.

    Args:
        zoo_names: all weights of the model, on this rank.
        parts: those among them that a module may hold.
        trained: those among `parts` that are trained.
    """
    entries = bridge.publish(zoo_names)
    names = {name: _in_memory(entry, bridge, config) for name, entry in entries.items()}
    outside = {above for name in names if name not in parts for parameter in names[name] for above in _above(parameter)}
    owners = {parameter.rpartition(".")[0] for name in trained for parameter in names[name]} - outside - {""}
    modules = sorted(owner for owner in owners if owners.isdisjoint(_above(owner)))
    saved = [
        Saved(name, entries[name], tuple(f"{PREFIX}{parameter}" for parameter in names[name]))
        for name in parts
        if all(not _above(parameter).isdisjoint(modules) for parameter in names[name])
    ]
    return modules, saved


def _above(name: str) -> set[str]:
    """The names of the modules that a parameter or module is in."""
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def choose(
    available: Iterable[Target], wanted: Sequence[str], everywhere: Sequence[str], renames: Renames = SAME
) -> list[Target]:
    """Those of `available` that a recipe's `lora.targets` mean; `everywhere`: the modules of all ranks' candidates.

    A target is ALL, a name or the end of one (`q_proj`, `self_attn.q_proj`), or a regular expression of a whole name.
    Experts are meant by `experts.gate_up_proj` and `experts.down_proj` alone. UserError where a target means nothing.
    """
    for target in wanted:
        if not any(means(target, name) for name in renames.all(everywhere)):
            last = {".".join(name.split(".")[-1 - ("experts" in name) :]) for name in everywhere}
            near = get_close_matches(target, sorted(last), n=3) or sorted(last)
            raise UserError(
                f"lora.targets={target}: no linear of lora.parts is called so; nearest: {', '.join(near)} "
                f"({ALL}: all of them but experts)"
            )
    targets = [
        replace(
            target,
            chosen=tuple(
                any(means(each, name) for each in wanted for name in renames.both(module)) for module in target.modules
            ),
        )
        for target in available
    ]
    return [target for target in targets if any(target.chosen)]


def means(target: str, name: str) -> bool:
    """Whether a recipe's target means the module of that name (see `choose`)."""
    experts = re.search(r"\bexperts\.\w+$", name) is not None
    if target == ALL:
        return not experts
    if name == target or name.endswith(f".{target}"):
        return not experts or "experts" in target
    try:
        return re.fullmatch(target, name) is not None
    except re.error:
        return False


def tensor_names(modules: Iterable[str], stacks: Collection[str]) -> list[tuple[str, str]]:
    """PEFT's names of (A, B) of each module; `stacks` are the stacked parameters of the whole model that have adapters.

    PEFT wraps the module of a parameter, and what it has wrapped already: gate_up_proj, which comes first in the module,
    lies inside down_proj.
    """
    pairs = []
    for name in modules:
        module, _, parameter = name.rpartition(".")
        inside = parameter == "gate_up_proj" and f"{module}.down_proj" in stacks
        wrapped = name if name not in stacks else f"{module}.base_layer" if inside else module
        pairs.append((f"{PREFIX}{wrapped}.lora_A.weight", f"{PREFIX}{wrapped}.lora_B.weight"))
    return pairs


def to_peft(target: Target, a: Tensor, b: Tensor, dims: Dims) -> list[tuple[Tensor, Tensor]]:
    """(A, B) of each of `target.named` out of the full `a` and `b`."""
    if target.stacked:
        return [(a.flatten(0, 1), b.permute(1, 2, 0).flatten(1))]
    kept = _rows_of_named(target, b, dims)
    parts = zip(a.chunk(len(kept)), kept, target.ranks, strict=True)
    return [(part[:rank].contiguous(), rows[:, :rank].contiguous()) for part, rows, rank in parts]


def magnitudes(target: Target, m: Tensor, dims: Dims) -> list[Tensor]:
    """DoRA's magnitude of each of `target.named` out of the full `m` (out,)."""
    return [rows[:, 0].contiguous() for rows in _rows_of_named(target, m[:, None], dims)]


def magnitude_names(modules: Iterable[str]) -> list[str]:
    """PEFT's names of DoRA's magnitudes."""
    return [f"{PREFIX}{name}.lora_magnitude_vector" for name in modules]


def _rows_of_named(target: Target, rows: Tensor, dims: Dims) -> list[Tensor]:
    parts = target.entry.layout.transform.to_hf(rows, dims)
    return [part for part, chosen in zip(parts, target.chosen, strict=True) if chosen]


def to_zoo(
    target: Target, pairs: Sequence[tuple[Tensor, Tensor]], shape: Sequence[int], dims: Dims
) -> tuple[Tensor, Tensor]:
    """Full `a` and `b` of a weight of that full shape: the inverse of `to_peft`."""
    if target.stacked:
        ((a, b),) = pairs
        experts = shape[0]
        return a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    short = [target.rank - rank for rank in target.ranks]
    a = torch.cat([F.pad(a, (0, 0, 0, more)) for (a, _), more in zip(pairs, short, strict=True)])
    return a, rows_to_zoo(target, [F.pad(b, (0, more)) for (_, b), more in zip(pairs, short, strict=True)], shape, dims)


def rows_to_zoo(target: Target, parts: Sequence[Tensor], shape: Sequence[int], dims: Dims) -> Tensor:
    """Rows (out, n) of the full weight out of those of each of `target.named`, zeros where there is no adapter."""
    remaining, width = iter(parts), parts[0].shape[1]
    sizes = [part[0] for part in target.entry.hf_shapes(shape, dims).values()]
    rows = [
        next(remaining) if chosen else parts[0].new_zeros(size, width)
        for size, chosen in zip(sizes, target.chosen, strict=True)
    ]
    return target.entry.layout.transform.to_zoo(rows, dims)


def peft_config(
    linears: Iterable[str], stacks: Iterable[str], sizes: Sizes,
    *, dora: bool, dropout: float, base: str, experts: bool, whole: Iterable[str] = (), head: str | None = None,
) -> JsonObject:  # fmt: skip
    """adapter_config.json of adapters of those modules and stacked parameters.

    `base`: folder or hub id of the weights that are adapted; `whole`: modules that are trained whole; `head`: the one among them
    that is a reward model's head, which PEFT knows by the last part of its name; `experts`: whether the model has some. In such a model PEFT reads modules called gate_proj, up_proj or down_proj as the experts of older models; as parameters they are what they
    are. Where there are parameters it refuses dropout, which is of no use after training.
    """
    saved = [module.rpartition(".")[2] if module == head else module for module in whole]
    of_old = {name for name in linears if experts and name.endswith(EXPERTS_OF_OLD)}
    parameters = [*stacks, *(f"{name}.weight" for name in of_old)]
    own = {f"{name}.weight" if name in of_old else name: sizes.named(name) for name in (*linears, *stacks)}
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if head else None,
        "base_model_name_or_path": base,
        "r": sizes.rank,
        "lora_alpha": _plain(sizes.alpha),
        "rank_pattern": {name: rank for name, (rank, _) in own.items() if rank != sizes.rank},
        "alpha_pattern": {name: _plain(alpha) for name, (_, alpha) in own.items() if alpha != sizes.alpha},
        "lora_dropout": 0.0 if parameters else dropout,
        "target_modules": sorted(set(linears) - of_old),
        "target_parameters": sorted(parameters) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": sizes.rslora,
        "use_dora": dora,
        "init_lora_weights": True,
        "modules_to_save": saved or None,
        "inference_mode": True,
    }


def settings_of(config: JsonMapping, where: str) -> JsonObject:
    """A recipe's `lora` section, but for parts, that an adapter_config.json stands for; UserError where there is none."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    modules, parameters = config.get("target_modules") or [], config.get("target_parameters") or []
    targets = [*([modules] if isinstance(modules, str) else modules), *parameters]
    if not (is_count(rank) and rank and is_number(alpha) and alpha > 0 and targets and are_texts(targets)):
        raise UserError(f"{where}: r, lora_alpha and target_modules are not all there; wanted a LoRA adapter of PEFT's")
    if config.get("modules_to_save"):
        saved = printable(repr(config["modules_to_save"]), 200)
        raise UserError(
            f"{where}: modules_to_save is {saved}, which is not merged; merge it by peft (merge_and_unload) and start from that folder"
        )
    return {
        "rank": rank, "alpha": float(alpha), "rslora": bool(config.get("use_rslora")), "dora": bool(config.get("use_dora")),
        **{key: {name.removesuffix(".weight"): n for name, n in _pattern(config, key, where).items()} for key in _PATTERNS},
        "targets": [name.removesuffix(".weight") for name in targets],
    }  # fmt: skip


def check_config(
    config: JsonMapping,
    where: str,
    sizes: Sizes,
    modules: Iterable[str],
    head: str | None = None,
    *,
    dora: bool = False,
    whole_parts: Collection[str] = (),
) -> None:
    """UserError where an adapter_config.json is of something else than a recipe's `lora` says.

    `modules`: those and the stacked parameters that have an adapter; `head`: the module that is a reward model's head; without it and `whole_parts`, no module may be
    saved whole.
    """
    wanted: dict[str, tuple[object, str]] = {
        "peft_type": ("LORA", ""), "r": (sizes.rank, "lora.rank"), "lora_alpha": (sizes.alpha, "lora.alpha"),
        "use_rslora": (sizes.rslora, "lora.rslora"), "use_dora": (dora, "lora.dora"),
    }  # fmt: skip
    for key, (value, hint) in wanted.items():
        stored = config.get(key, False if isinstance(value, bool) else None)
        if stored != value:
            there = printable(str(stored).lower() if isinstance(stored, bool) else repr(stored), 100)
            fix = f"set {hint}={there}" if hint else "only LoRA adapters are read"
            raise UserError(f"{where}: {key} is {there} there and {value!r} here; {fix}")
    patterns = {key: _pattern(config, key, where) for key in _PATTERNS}
    theirs = replace(sizes, ranks=patterns["rank_pattern"], alphas=patterns["alpha_pattern"])
    parameters = config.get("target_parameters") or ()
    for name in modules:
        key = f"{name}.weight" if f"{name}.weight" in parameters else name
        if theirs.named(key) != sizes.named(name):
            stored, wanted_text = (
                f"rank {rank}, alpha {alpha:g}" for rank, alpha in (theirs.named(key), sizes.named(name))
            )
            raise UserError(
                f"{where}: {name} has {stored} there and {wanted_text} here; set lora.rank_pattern and lora.alpha_pattern as the file has them"
            )
    foreign = {key: config.get(key) for key in _FOREIGN}
    saved = config.get("modules_to_save") or []
    heads = {head.rpartition(".")[2], *_HEADS} if head else set()
    if not are_texts(saved):
        foreign["modules_to_save"] = saved
    elif not whole_parts and not heads.issuperset(saved):
        raise UserError(
            f"{where}: modules_to_save is {printable(repr(saved), 200)}, and no such module is trained whole here; name the part of the model "
            "that they are in with lora.whole_parts"
        )
    for key, value in foreign.items():
        if value:
            raise UserError(f"{where}: {key} is {printable(repr(value), 200)}, which zoo's adapters don't have")


def _pattern(config: JsonMapping, key: str, where: str) -> dict[str, Any]:
    """A rank_pattern or alpha_pattern of an adapter_config.json."""
    pattern = config.get(key) or {}
    if not isinstance(pattern, dict) or not all(map(_PATTERNS[key], pattern.values())):
        raise UserError(f"{where}: {key} is {printable(repr(pattern), 200)}; wanted numbers above 0 by ends of names")
    return pattern


def _plain(alpha: float) -> float:
    return int(alpha) if alpha == int(alpha) else alpha


def match(
    there: Mapping[str, Sequence[int]], everywhere: Collection[str], wanted: Mapping[str, Sequence[int]], where: str
) -> None:
    """BridgeError that lists every tensor of an adapter's file that is missing, extra or misshapen.

    `there`: shapes in the file; `everywhere`: names that all ranks want, `wanted`: shapes of those that this one does.
    """
    problems = [f"{name}: missing" for name in sorted(set(everywhere) - there.keys())]
    problems += [f"{name}: extra: no target of the recipe has it" for name in sorted(there.keys() - set(everywhere))]
    problems += [
        f"{name}: shape {list(there[name])}, wanted {list(shape)}"
        for name, shape in wanted.items()
        if name in there and tuple(there[name]) != tuple(shape)
    ]
    if problems:
        raise BridgeError(f"{where}: the adapter and the recipe do not match", problems)
