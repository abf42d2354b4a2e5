"""A family's table of HF tensor names <-> zoo parameter names, and how a checkpoint's tensors are paired with a model's.

`Bridge.resolve` pairs the tensors of a checkpoint with those of a model and raises one BridgeError that lists
every tensor without a partner. It works on names alone: nothing is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property

import torch

from zoo.bridge.errors import BridgeError
from zoo.bridge.mapping.rules import Layout, PublishedFP8, Rule, compile_pattern
from zoo.bridge.mapping.transforms import Dims
from zoo.types import JsonMapping, JsonObject

# Buffers that a checkpoint may hold and every model makes for itself from its config, as transformers does: angles of
# rotary embeddings, places of CLIP's patches.
_BUFFERS = re.compile(r"(.*\.)?(rotary_emb|rotary_pos_emb)\.(original_)?inv_freq|(.*\.)?embeddings\.position_ids")


SCORE = "score.weight"  # the head of a reward model
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # matrices with a row for each token
HEAD, LAST_NORM = VOCABULARY[1], "decoder.final_layernorm.weight"
# A reward or embedding model may begin with the checkpoint of a language model, which has another head.
HEADS = ("*score.weight", "*lm_head.weight", "*output_layer.weight")


@dataclass(frozen=True)
class Entry:
    """One zoo tensor (global name), its rule, and the layout that its HF side has."""

    zoo: str
    rule: Rule
    layout: Layout
    binding: Mapping[str, str]

    def hf_names(self, expert: int | None = None) -> list[str]:
        """Published HF names of the tensor's parts (of one `expert`, where each has its own)."""
        return self.layout.names(self.binding, expert)

    def all_names(self, dims: Dims) -> list[str]:
        """HF names of the tensor's parts, of all its experts."""
        return self.layout.all_names(self.binding, self.rule.experts(dims))

    @property
    def kept_layout(self) -> str | None:
        """The first published name of a tensor in a layout that exports keep, where that is not the one that goes without saying."""
        kept = self.rule.keeps_layout and self.layout in self.rule.layouts[1:]
        return self.hf_names(0)[0] if kept else None

    def stored_as(self, hf_name: str | None) -> Entry:
        """The published entry in the layout of which `kept_layout` gave that name; ValueError where the rule has no such layout."""
        if hf_name is None:
            return self
        for layout in self.rule.layouts if self.rule.keeps_layout else ():
            if layout.names(self.binding, 0)[0] == hf_name:
                return replace(self, layout=layout)
        raise ValueError(f"no layout of {self.zoo} has a tensor {hf_name!r}")

    def in_fp8(self, published: PublishedFP8) -> Entry:
        """The published entry in the layout that folders in FP8 have."""
        if not published.single_experts:
            return replace(self, layout=self.rule.layouts[0])
        return replace(self, layout=next((layout for layout in self.rule.layouts if layout.per_expert), self.layout))

    def variants(self, dims: Dims) -> list[Entry]:
        """The entry in each layout that has the names of its own: what a file's shapes decide between."""
        layouts = self.rule.read_layouts(dims)
        return [replace(self, layout=layout) for layout in layouts if layout.patterns == self.layout.patterns]

    def hf_shapes(self, zoo_shape: Sequence[int], dims: Dims) -> dict[str, tuple[int, ...]]:
        """HF name -> shape for the full zoo tensor's shape; ValueError where the transform cannot take it."""
        full = torch.empty(zoo_shape[1:] if self.rule.stacked else zoo_shape, device="meta")
        try:
            shapes = [tuple(part.shape) for part in self.layout.transform.to_hf(full, dims)]
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        if self.layout.per_expert:
            names = [name for expert in range(zoo_shape[0]) for name in self.hf_names(expert)]
            return dict(zip(names, shapes * zoo_shape[0], strict=True))
        experts = tuple(zoo_shape[:1]) if self.rule.stacked else ()
        return dict(zip(self.hf_names(), [(*experts, *shape) for shape in shapes], strict=True))


@dataclass(frozen=True)
class Resolution:
    """What `Bridge.resolve` found: each zoo tensor's entry, and where the file keeps each tensor."""

    entries: Mapping[str, Entry]  # zoo name -> entry
    passed_through: Sequence[str]  # names, as in the source, of tensors that zoo does not train
    source: Mapping[str, str]  # published name -> name in the source
    allowed: Sequence[str] = ()  # problems that the caller has allowed, of tensors that are left out
    buffers: Sequence[str] = ()  # published names of known buffers, which are not read
    # Published name of a tied tensor that is stored all the same -> of the one that it must equal (`zoo.bridge.load`).
    doubles: Mapping[str, str] = field(default_factory=dict)

    @property
    def redundant(self) -> set[str]:
        """Published names of tensors that hold nothing of their own."""
        return {*self.buffers, *self.doubles}


@dataclass(frozen=True, kw_only=True)
class Bridge:
    """A family's table. HF names in it are the published ones (those of the hub), which are what is written."""

    name: str  # the family's
    rules: tuple[Rule, ...]  # which published tensors each parameter is made of
    pass_through: tuple[str, ...] = ()  # HF patterns of tensors zoo does not train: read past, exported byte for byte
    carry_files: tuple[str, ...] = ()
    """Names of files that transformers wants beside such tensors: copied as they are, never opened."""
    optional: tuple[str, ...] = ()
    """HF patterns of parts that a model may be built without: passed through where it has none of their tensors."""
    optional_key: str = "train.mtp_loss"  # the recipe's key that builds them, by a value above 0
    name_prefixes: tuple[Mapping[str, str], ...] = ()  # other naming schemes that are read: their prefix -> published
    fp32: tuple[
        str, ...
    ] = ()  # zoo's patterns of parameters that are published in fp32, beside others in half precision
    export_config: Callable[[JsonObject, Collection[str]], JsonObject] | None = None
    """(HF config as a dict, published names of all tensors that are exported) -> the config.json of the export."""
    fresh_config: Callable[[JsonObject, Collection[str]], JsonObject] | None = None
    """The same before it, for a model that did not begin with a folder's weights: what its config may say without them."""
    module_names: Callable[[JsonMapping], Mapping[str, str]] = lambda config: {}
    """config.json of a checkpoint -> prefixes that its modules have in transformers, by published ones, where these differ."""
    renamed_modules: Callable[[JsonMapping], Mapping[str, str]] = lambda config: {}
    """config.json of a checkpoint -> prefixes of modules in later transformers, by those they had before, where it renamed some."""
    fp8: PublishedFP8 | None = None  # of families that are published in it
    stacked_adapters: bool = False
    """Whether vLLM loads adapters of the family's experts as stacks (`is_3d_moe_weight` of its class), not one by one."""

    @cached_property
    def _pass_through_regex(self) -> list[re.Pattern[str]]:
        return [compile_pattern(pattern) for pattern in self.pass_through]

    @cached_property
    def _optional_regex(self) -> list[re.Pattern[str]]:
        return [compile_pattern(pattern) for pattern in self.optional]

    @cached_property
    def _hf_regex(self) -> list[tuple[re.Pattern[str], Rule]]:
        return [(compile_pattern(p), r) for r in self.rules for layout in r.layouts for p in layout.patterns]

    def passes_through(self, hf_name: str) -> bool:
        """Whether the published name is of a tensor that zoo carries along untouched."""
        return any(regex.fullmatch(hf_name) for regex in self._pass_through_regex)

    def zoo_name(self, hf_name: str) -> str | None:
        """The zoo tensor that the published name is a part of, whether or not a model has it."""
        for regex, rule in self._hf_regex:
            if match := regex.fullmatch(hf_name):
                return rule.zoo.format(**match.groupdict())
        return None

    def zoo_names(self, hf_names: Collection[str]) -> dict[str, list[str]]:
        """A checkpoint's names -> the zoo tensors that each may be a part of; without what zoo carries along, and without unknown ones."""
        source, _ = self._translate(hf_names)
        candidates: dict[str, list[str]] = {}
        for name, actual in source.items():
            for regex, rule in self._hf_regex if not self.passes_through(name) else ():
                if match := regex.fullmatch(name):
                    candidates.setdefault(actual, []).append(rule.zoo.format(**match.groupdict()))
        return candidates

    def in_memory(self, hf_name: str, config: JsonMapping) -> str:
        """The name that a published one has in transformers' model of that config.json."""
        return _rename(hf_name, self.module_names(config))

    def publish(self, zoo_names: Iterable[str]) -> dict[str, Entry]:
        """An entry in the published layout per zoo name; BridgeError lists the names without a rule."""
        entries, problems = {}, []
        for name in zoo_names:
            matches = [(r, m) for r in self.rules if (m := r.regex.fullmatch(name))]
            if len(matches) == 1:
                rule, match = matches[0]
                entries[name] = Entry(name, rule, rule.layouts[0], match.groupdict())
            else:
                problems.append(f"{name}: {len(matches) or 'no'} rules of the {self.name} bridge match it, wanted one")
        if problems:
            raise BridgeError(f"{self.name}: parameters that the mapping does not cover", problems)
        return entries

    def published_names(self, entries: Iterable[Entry], dims: Dims) -> list[str]:
        """All HF names that an export of `entries` writes; BridgeError lists those that two of them would write."""
        owner: dict[str, str] = {}
        problems = []
        for entry in entries:
            if not entry.rule.writes(dims):
                continue
            for name in entry.all_names(dims):
                if name in owner:
                    problems.append(f"{name}: written by both {owner[name]} and {entry.zoo}")
                owner[name] = entry.zoo
        if problems:
            raise BridgeError(f"{self.name}: duplicate tensors", problems)
        return list(owner)

    def resolve(
        self, hf_names: Collection[str], zoo_names: Iterable[str], dims: Dims, allow: Sequence[str] = ()
    ) -> Resolution:
        """Pair the tensors of a checkpoint with those of a whole model (all its ranks).

        Raises BridgeError that lists every tensor that is missing, unmapped, extra or there twice. Such a tensor whose
        name fits one of the patterns `allow` (`talker.*`) is left out instead, with what needs it.
        """
        source, problems = self._translate(hf_names)
        published_entries = self.publish(zoo_names)
        ends = LAST_NORM in published_entries  # else a stage without its model's end
        headless = ends and not dims.tied and HEAD not in published_entries
        allow = [*allow, *(HEADS if SCORE in published_entries or headless else ())]
        built = [entry.hf_names(0)[0] for entry in published_entries.values()]
        absent = [part for part in self._optional_regex if not any(part.fullmatch(name) for name in built)]
        pass_through = {n for n in source if self.passes_through(n) or any(part.fullmatch(n) for part in absent)}
        unused = set(source) - pass_through
        entries = {}
        for name, published in published_entries.items():
            layout, wrong = _choose_layout(published, source, dims)
            problems += wrong
            entries[name] = Entry(name, published.rule, layout, published.binding)
            for candidate in published.rule.read_layouts(dims):
                unused.difference_update(replace(published, layout=candidate).all_names(dims))
        buffers = sorted(name for name in unused if _BUFFERS.fullmatch(name))
        doubles = {n: tied for n in sorted(unused) if (tied := self._tied_to(n)) in source} if dims.tied else {}
        for name in sorted(unused - set(buffers) - set(doubles)):
            target = self.zoo_name(name)
            why = f"extra: {target} has no such part" if target in entries else f"extra: the model has no {target}"
            problems.append(f"{source[name]}: {'unmapped: no rule has it' if target is None else why}")
        refused = [problem for problem in problems if not is_allowed(problem, allow)]
        if refused:
            raise BridgeError(f"{self.name}: the checkpoint and the model do not match", refused, self._helps(refused))
        names_of = {name: entry.all_names(dims) for name, entry in entries.items()}
        whole = {name: entries[name] for name, parts in names_of.items() if all(part in source for part in parts)}
        passed_through = [actual for name, actual in source.items() if name in pass_through]
        return Resolution(whole, passed_through, source, problems, buffers, doubles)

    def has_optional(self, hf_names: Collection[str]) -> bool:
        """Whether a tensor that a rule maps is of a part that a model may be built without; False where there is no such part."""
        published, _ = self._translate(hf_names)
        optional = (name for name in published if any(part.fullmatch(name) for part in self._optional_regex))
        return any(regex.fullmatch(name) for name in optional for regex, _ in self._hf_regex)

    def _tied_to(self, hf_name: str) -> str:
        """The published name that a tied model has in the place of this one; empty where it has none."""
        return next((r.tied_to for regex, r in self._hf_regex if regex.fullmatch(hf_name) and r.tied_to), "")

    def _helps(self, problems: Sequence[str]) -> list[str]:
        """What to do about tensors that are missing or left over, each said once."""
        wanted = [p.partition(":")[0] for p in problems if ": missing, " in p]
        missing = [name for name in wanted if not any(part.fullmatch(name) for part in self._optional_regex)]
        helps = []
        if len(missing) < len(wanted):
            parts = ", ".join(pattern.replace("{rest}", "*") for pattern in self.optional)
            helps.append(f"{self.optional_key}=0 builds the model without {parts}")
        heads = [name for name in missing if self._tied_to(name)]
        if heads:
            helps.append("tie_word_embeddings=true in config.json, where the head is the embedding")
            helps.append(
                "an embedding model has no head: train.loss=embed trains it on, train.loss=reward with a new one for scores"
            )
        if missing:
            helps.append("missing tensors: get the whole checkpoint, or the config.json that belongs to it")
        if len(wanted) < len(problems):
            helps.append("zoo convert with allow=NAME,... leaves out tensors that are of no use (allow='talker.*')")
        return helps

    def _translate(self, hf_names: Collection[str]) -> tuple[dict[str, str], list[str]]:
        """Published name -> given name, in the prefixes that leaves the fewest names unknown; names met twice."""
        best: dict[str, list[str]] = {}
        fewest = len(hf_names) + 1
        for prefixes in ({}, *self.name_prefixes, {"": "model."}):  # the last of what AutoModel saves, without a head
            translated: dict[str, list[str]] = {}
            for name in sorted(hf_names):
                translated.setdefault(_rename(name, prefixes), []).append(name)
            unknown = sum(not self.passes_through(n) and self.zoo_name(n) is None for n in translated)
            if unknown < fewest:
                best, fewest = translated, unknown
            if not unknown:
                break
        twice = [f"{name}: duplicate, stored as {' and '.join(n)}" for name, n in best.items() if len(n) > 1]
        return {name: names[0] for name, names in best.items()}, twice


def is_allowed(problem: str, patterns: Sequence[str]) -> bool:
    """Whether the name that a problem begins with fits one of the patterns."""
    return any(fnmatchcase(problem.partition(":")[0], pattern) for pattern in patterns)


def _rename(name: str, prefixes: Mapping[str, str]) -> str:
    for prefix, published in prefixes.items():
        if name.startswith(prefix):
            return published + name.removeprefix(prefix)
    return name


def _choose_layout(entry: Entry, source: Mapping[str, str], dims: Dims) -> tuple[Layout, list[str]]:
    """The one layout of which `source` has every tensor, or the problems if there is none or more than one.

    Of layouts with the same names it is the first (`Entry.variants`).
    """
    by_names: dict[tuple[str, ...], Layout] = {}
    for layout in entry.rule.read_layouts(dims):
        by_names.setdefault(layout.patterns, layout)
    options = []  # (share missing, layout, names missing)
    for layout in by_names.values():
        names = replace(entry, layout=layout).all_names(dims)
        missing = [name for name in names if name not in source]
        options.append((len(missing) / max(len(names), 1), layout, missing))
    present = [layout for share, layout, _ in options if share < 1]
    best = min(options, key=lambda option: option[0])
    if len(present) > 1:
        names = [layout.names(entry.binding, 0)[0] for layout in present]
        return best[1], [f"{names[0]}: duplicate, {entry.zoo} is also stored as {', '.join(names[1:])}"]
    return best[1], [f"{name}: missing, {entry.zoo} needs it" for name in best[2]]
