"""The matrix of tests/distributed/test_matrix.py: models, parallel layouts, sample layouts, and what is refused.

docs/parallelism.md shows it as a table; `python -m pytest -m "" tests/distributed/test_matrix.py tests/distributed/test_talker.py --write-table` writes it anew
from what was run and measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.engine import Batch, packed_batch, padded_batch
from support.families import FAMILIES
from support.tiny_gemma3 import FULL, SLIDING
from support.tiny_qwen35 import LINEAR


@dataclass(frozen=True)
class Model:
    """A column: what the model has, a family of support.families with its sizes, and the rows that its batches hold."""

    title: str
    family: str
    groups: tuple[tuple[str, ...], ...]  # names of examples, one micro-batch a group
    sizes: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()

    @property
    def recipe(self) -> str:
        return FAMILIES[self.family].recipe

    @property
    def examples(self) -> Callable[[Any], dict[str, Any]]:
        """Processor -> examples by name."""
        return FAMILIES[self.family].examples

    def write(self, folder: Path) -> Path:
        """Write the checkpoint and give back its folder."""
        return FAMILIES[self.family].write(folder, **self.sizes)

    def publish(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors of transformers' model by their published names."""
        return FAMILIES[self.family].publish(tensors)


@dataclass(frozen=True)
class Parallel:
    """A row: ranks and overrides."""

    title: str
    ranks: int
    overrides: tuple[str, ...]

    @property
    def kinds(self) -> set[str]:
        """The kinds of parallelism that the layout uses (tp, sp, pp, ...); dp where it uses no other."""
        given = dict(override.removeprefix("parallel.").split("=") for override in self.overrides)
        if "tp" in given:
            given.setdefault("sp", "true")  # as a recipe has it
        return {key for key, value in given.items() if value != "false"} or {"dp"}


# Two micro-batches, the second without media. Samples of many lengths, so that media lie across CP chunks.
SEEN = (("image-long", "text-short", "multi_image-long", "video-short", "turns"), ("text-long", "text-short"))
SAID = (("text-long", "turns", "long", "text-short"), ("system", "text-short"))
HEARD = (("image-long", "audio-short", "text-short", "video-short", "image+video+audio"), ("text-long", "text-short"))
SOUND = (("audio-long", "text-short", "audio-short", "turns", "context"), ("text-long", "text-short"))
TILED = (("wide", "text-short", "three", "video+image+image", "turns"), ("text-long", "text-short"))
PICTURES = (("wide", "text-short", "three", "two", "turns"), ("text-long", "text-short"))
FOUR = {"num_hidden_layers": 4}
WINDOWS = FOUR | {"layer_types": [SLIDING, FULL, SLIDING, SLIDING]}

MODELS = {
    "dense": Model("dense, deepstack", "qwen3_vl", SEEN, FOUR),
    "deepstack": Model("experts, deepstack", "qwen3_vl experts", SEEN, FOUR),
    "moe": Model(
        "experts, shared expert with gate", "qwen35_vl experts", SEEN, {"layers": [FULL] * 4}, ("train.mtp_loss=0",)
    ),
    "gdn": Model("Gated DeltaNet hybrid", "qwen35_vl", SEEN),
    "mtp": Model(
        "hybrid with experts and MTP",
        "qwen35_vl experts",
        SEEN,
        {"layers": [LINEAR, FULL, LINEAR, FULL], "mtp": 2},
        ("train.mtp_loss=0.3",),
    ),
    "llava": Model("dense with biases, tiles of images", "llava_onevision", TILED, {"text": FOUR}),
    "windows": Model("dense with biases, windows in the tower", "qwen25_vl", SEEN, FOUR),
    "sound": Model("dense, sound", "qwen3_asr", SOUND, FOUR),
    "windows omni": Model("dense with biases, windows, audio", "qwen25_omni", HEARD, FOUR),
    "two-way": Model("dense, sliding layers, two-way attention in images", "gemma3", PICTURES, WINDOWS),
    "capped": Model("text alone, sliding layers, capped logits", "gemma3_text", SAID, WINDOWS),
    "full heads": Model(
        "dense, full layers with wider heads whose values are keys",
        "gemma4",
        PICTURES,
        FOUR | {"layer_types": [SLIDING, FULL] * 2},
    ),
    "text": Model("text alone, dense and with experts", "qwen3 experts", SAID, FOUR | {"mlp_only_layers": [1]}),
    "next": Model("text alone, hybrid with experts and MTP", "qwen3_next", SAID, {"mtp": 1}, ("train.mtp_loss=0.3",)),
    "said": Model(
        "text alone, hybrid with experts and two layers of MTP",
        "qwen35_text experts",
        SAID,
        {"layers": [LINEAR, FULL, LINEAR, FULL], "mtp": 2},
        ("train.mtp_loss=0.3",),
    ),
    "tiles": Model("experts, shuffled tiles", "internvl experts", TILED, {"text": FOUR}),
    "sigmoid": Model("experts by sigmoid routing, shared expert", "glm45v", SEEN, FOUR | {"first_k_dense_replace": 1}),
    "omni": Model("experts, deepstack, audio", "qwen3_omni", HEARD, FOUR | {"mlp_only_layers": [1], "num_experts": 6}),
}

TALKERS = {  # further columns, by family: tests/distributed/test_talker.py
    "qwen3_omni": "thinker with its talker, both with experts",
    "qwen25_omni": "thinker with its talker, dense",
}

PARALLEL = {
    "tp2": Parallel("TP2", 2, ("parallel.tp=2", "parallel.sp=false")),
    "tp2 sp": Parallel("TP2 + SP", 2, ("parallel.tp=2", "parallel.sp=true")),
    "pp2": Parallel("PP2", 2, ("parallel.pp=2",)),
    "pp2 vpp2": Parallel("PP2, interleaved", 2, ("parallel.pp=2", "parallel.vpp=2")),
    "cp2": Parallel("CP2", 2, ("parallel.cp=2",)),
    "cp4": Parallel("CP4", 4, ("parallel.cp=4",)),
    "ep2": Parallel("EP2", 2, ("parallel.ep=2",)),
    "ep2 etp2": Parallel("TP2 (+ SP), EP2 x ETP2", 4, ("parallel.tp=2", "parallel.ep=2", "parallel.etp=2")),
    "dp2": Parallel("DP2", 2, ()),
    "tp2 cp2": Parallel("TP2 (+ SP) x CP2", 4, ("parallel.tp=2", "parallel.cp=2")),
    "pp2 cp2": Parallel("PP2 x CP2", 4, ("parallel.pp=2", "parallel.cp=2")),
    "cp2 ep2": Parallel("CP2 x EP2", 2, ("parallel.cp=2", "parallel.ep=2")),
    "tp2 pp2": Parallel("TP2 (+ SP) x PP2", 4, ("parallel.tp=2", "parallel.pp=2")),
}

# The cells of the fast tier, (parallel, model). Each pair of kinds of parallelism that some row combines, and each model once.
CORE = {
    ("pp2 vpp2", "dense"),
    ("ep2 etp2", "deepstack"),
    ("dp2", "moe"),
    ("tp2 cp2", "gdn"),
    ("cp2 ep2", "mtp"),
    ("tp2 pp2", "llava"),
    ("pp2 cp2", "omni"),
    ("cp4", "sound"),
    ("tp2", "windows omni"),
    ("tp2 sp", "windows"),
    ("cp2", "two-way"),
    ("tp2 sp", "capped"),
    ("tp2 cp2", "full heads"),
    ("ep2", "text"),
    ("pp2", "next"),
    ("cp2", "said"),
    ("ep2", "tiles"),
    ("cp2 ep2", "sigmoid"),
}

# (parallel, model) that validation refuses, by a part of its message.
NO_EXPERTS = "in a model without experts"
NEEDS_SP = "needs sequence parallel"
EXPERTS = {name: FAMILIES[built.family].experts for name, built in MODELS.items()} | {
    name: FAMILIES[name].experts for name in TALKERS
}
REFUSED = {
    **{
        (parallel, model): NO_EXPERTS
        for parallel in ("ep2", "ep2 etp2", "cp2 ep2")
        for model, experts in EXPERTS.items()
        if not experts
    },
    **{("tp2", model): NEEDS_SP for model, experts in EXPERTS.items() if experts},
}

LAYOUTS = ("padded (mode none)", "packed from a padded batch", "packed by the loader", "packed to pad_to")
CP_UNIT = 8  # what every alignment of the matrix divides


def layouts(samples: dict[str, Any], groups: tuple[tuple[str, ...], ...]) -> list[tuple[list[Batch], tuple[str, ...]]]:
    """Micro-batches and overrides of each of LAYOUTS."""
    rows = [[samples[name] for name in group] for group in groups]
    padded = [padded_batch(group, "mixed", fill=1) for group in rows]
    packed = [packed_batch(group) for group in rows]
    longest = max(sum(-(-sample.length // CP_UNIT) * CP_UNIT for sample in group) for group in rows)
    static = (f"packing.budget={longest + 5 * CP_UNIT}", f"packing.pad_to={longest + 5 * CP_UNIT}")
    return [(padded, ("packing.mode=none",)), (padded, ()), (packed, ()), (packed, static)]


def table(errors: dict[tuple[str, str], float]) -> str:
    """The Markdown table: a row a model, with its worst relative gradient error and what is refused; then the parallel layouts."""
    notes = list(dict.fromkeys(REFUSED.values()))
    lines = ["| model | worst gradient error | refused |", "|---|---|---|"]
    for model, title in ({name: built.title for name, built in MODELS.items()} | TALKERS).items():
        worst = max(errors[parallel, model] for parallel in PARALLEL if (parallel, model) not in REFUSED)
        refused = sorted({notes.index(note) + 1 for (_, name), note in REFUSED.items() if name == model})
        lines.append(f"| {title} | {worst:.1e} | {', '.join(map(str, refused))} |")
    lines += ["", "Refused before anything is loaded, with a message that also says what would work:", ""]
    for number, note in enumerate(notes, 1):
        titles = [
            row.title
            for key, row in PARALLEL.items()
            if note in {why for (name, _), why in REFUSED.items() if name == key}
        ]
        lines.append(f'{number}. {"; ".join(titles)}: "... {note} ..."')
    lines += ["", "Parallel layouts:", "", *(f"- {row.title}" for row in PARALLEL.values())]
    return "\n".join(lines) + "\n"


BEGIN, END = "<!-- table: written by the tests -->\n", "<!-- end of table -->\n"


def written_table(page: str) -> str:
    """The table in docs/parallelism.md."""
    return page.split(BEGIN)[1].split(END)[0]


def replace_table(page: str, made: str) -> str:
    """docs/parallelism.md with another table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + made + END + rest.split(END)[1]
