"""The matrix of tests/distributed/test_matrix.py: models, parallel layouts, sample layouts, and what is refused.

docs/parallelism.md shows it as a table; `python -m pytest -m "" tests/distributed/test_matrix.py --write-table` writes it anew
from what was run and measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from support.engine import Batch, packed_batch, padded_batch
from support.rows import make_examples
from support.sound_rows import sound_examples
from support.text_rows import text_examples
from support.tile_rows import tile_examples
from support.vision_rows import vision_examples


@dataclass(frozen=True)
class Model:
    """A column: what the model has, how its checkpoint is written, and the rows that its batches hold."""

    title: str
    recipe: str
    write: Callable[[Path], Path]
    examples: Callable[[Any], dict[str, Any]]  # processor -> examples by name
    groups: tuple[tuple[str, ...], ...]  # names of examples, one micro-batch a group
    overrides: tuple[str, ...] = ()
    published: str = ""  # "module:function" of tests/support, where transformers' names in memory are others

    def publish(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors of transformers' model by their published names."""
        if not self.published:
            return dict(tensors)
        module, _, function = self.published.partition(":")
        return getattr(import_module(f"support.{module}"), function)(tensors)


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


def _qwen35(**sizes: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        from support.tiny_qwen35 import write_tiny_qwen35

        return write_tiny_qwen35(folder, **sizes)

    return write


def _qwen3_vl(**sizes: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        from support.tiny_qwen3_vl import write_tiny_qwen3_vl

        return write_tiny_qwen3_vl(folder, num_hidden_layers=4, **sizes)

    return write


def _qwen25_vl(folder: Path) -> Path:
    from support.tiny_qwen25_vl import write_tiny_qwen25_vl

    return write_tiny_qwen25_vl(folder, num_hidden_layers=4)


def _qwen3_asr(folder: Path) -> Path:
    from support.tiny_qwen3_asr import write_tiny_qwen3_asr

    return write_tiny_qwen3_asr(folder, num_hidden_layers=4)


def _qwen25_omni(folder: Path) -> Path:
    from support.tiny_qwen25_omni import write_tiny_qwen25_omni

    return write_tiny_qwen25_omni(folder, num_hidden_layers=4)


def _gemma3(folder: Path) -> Path:
    from support.tiny_gemma3 import FULL, SLIDING, write_tiny_gemma3

    return write_tiny_gemma3(folder, num_hidden_layers=4, layer_types=[SLIDING, FULL, SLIDING, SLIDING])


def _gemma3_text(folder: Path) -> Path:
    from support.tiny_gemma3 import FULL, SLIDING, write_tiny_gemma3_text

    return write_tiny_gemma3_text(folder, num_hidden_layers=4, layer_types=[SLIDING, FULL, SLIDING, SLIDING])


def _gemma4(folder: Path) -> Path:
    from support.tiny_gemma4 import FULL, SLIDING, write_tiny_gemma4

    return write_tiny_gemma4(folder, num_hidden_layers=4, layer_types=[SLIDING, FULL] * 2)


def _qwen3(folder: Path) -> Path:
    from support.tiny_qwen3 import write_tiny_qwen3

    return write_tiny_qwen3(folder, moe=True, num_hidden_layers=4, mlp_only_layers=[1])


def _qwen3_next(folder: Path) -> Path:
    from support.tiny_qwen3_next import write_tiny_qwen3_next

    return write_tiny_qwen3_next(folder, mtp=1)


def _glm45v(folder: Path) -> Path:
    from support.tiny_glm45v import write_tiny_glm45v

    return write_tiny_glm45v(folder, num_hidden_layers=4, first_k_dense_replace=1)


def _llava(folder: Path) -> Path:
    from support.tiny_llava import write_tiny_llava

    return write_tiny_llava(folder, "llava_onevision", text={"num_hidden_layers": 4})


def _internvl(folder: Path) -> Path:
    from support.tiny_internvl import write_tiny_internvl

    return write_tiny_internvl(folder, "qwen3_moe", text={"num_hidden_layers": 4})


def _omni(folder: Path) -> Path:
    from support.tiny_omni import write_tiny_omni

    sizes: dict[str, Any] = {"num_hidden_layers": 4, "mlp_only_layers": [1], "num_experts": 6}
    return write_tiny_omni(folder, whole=False, **sizes).thinker


LINEAR, FULL = "linear_attention", "full_attention"
# Two micro-batches, the second without media. Samples of many lengths, so that media lie across CP chunks.
SEEN = (("image-long", "text-short", "multi_image-long", "video-short", "turns"), ("text-long", "text-short"))
SAID = (("text-long", "turns", "long", "text-short"), ("system", "text-short"))
HEARD = (("image-long", "audio-short", "text-short", "video-short", "image+video+audio"), ("text-long", "text-short"))
TILED = (("wide", "text-short", "three", "video+image+image", "turns"), ("text-long", "text-short"))

MODELS = {
    "dense": Model("dense, deepstack", "qwen3_vl_sft", _qwen3_vl(), vision_examples, SEEN),
    "deepstack": Model(
        "experts, deepstack",
        "qwen3_vl_moe_sft",
        _qwen3_vl(moe=True),
        vision_examples,
        SEEN,
        published="tiny_qwen3_vl:turn_experts",
    ),
    "moe": Model(
        "experts, shared expert with gate",
        "qwen35_vl_moe_sft",
        _qwen35(layers=[FULL] * 4, moe=True),
        vision_examples,
        SEEN,
        ("train.mtp_loss=0",),
    ),
    "gdn": Model(
        "Gated DeltaNet hybrid", "qwen35_vl_sft", _qwen35(layers=[LINEAR, LINEAR, FULL, LINEAR]), vision_examples, SEEN
    ),
    "mtp": Model(
        "hybrid with experts and MTP",
        "qwen35_vl_moe_sft",
        _qwen35(layers=[LINEAR, FULL, LINEAR, FULL], moe=True, mtp=2),
        vision_examples,
        SEEN,
        ("train.mtp_loss=0.3",),
    ),
    "llava": Model(
        "dense with biases, tiles of images",
        "llava_onevision_sft",
        _llava,
        tile_examples,
        TILED,
        published="tiny_llava:publish",
    ),
    "windows": Model(
        "dense with biases, windows in the tower",
        "qwen25_vl_sft",
        _qwen25_vl,
        vision_examples,
        SEEN,
        published="tiny_qwen25_vl:publish",
    ),
    "sound": Model(
        "dense, sound",
        "qwen3_asr_sft",
        _qwen3_asr,
        sound_examples,
        (("audio-long", "text-short", "audio-short", "turns", "context"), ("text-long", "text-short")),
    ),
    "windows omni": Model(
        "dense with biases, windows, audio",
        "qwen25_omni_sft",
        _qwen25_omni,
        make_examples,
        HEARD,
        published="tiny_qwen25_omni:published",
    ),
    "two-way": Model(
        "dense, sliding layers, two-way attention in images",
        "gemma3_sft",
        _gemma3,
        tile_examples,
        (("wide", "text-short", "three", "two", "turns"), ("text-long", "text-short")),
        published="tiny_gemma3:publish",
    ),
    "capped": Model("text alone, sliding layers, capped logits", "gemma3_text_sft", _gemma3_text, text_examples, SAID),
    "full heads": Model(
        "dense, full layers with wider heads whose values are keys",
        "gemma4_sft",
        _gemma4,
        tile_examples,
        (("wide", "text-short", "three", "two", "turns"), ("text-long", "text-short")),
    ),
    "text": Model(
        "text alone, dense and with experts",
        "qwen3_moe_sft",
        _qwen3,
        text_examples,
        SAID,
        published="tiny:experts_apart",
    ),
    "next": Model(
        "text alone, hybrid with experts and MTP",
        "qwen3_next_sft",
        _qwen3_next,
        text_examples,
        SAID,
        ("train.mtp_loss=0.3",),
        published="tiny:experts_apart",
    ),
    "tiles": Model(
        "experts, shuffled tiles", "internvl_sft", _internvl, tile_examples, TILED, published="tiny_internvl:publish"
    ),
    "sigmoid": Model(
        "experts by sigmoid routing, shared expert",
        "glm45v_sft",
        _glm45v,
        vision_examples,
        SEEN,
        published="tiny_glm45v:publish",
    ),
    "omni": Model(
        "experts, deepstack, audio", "qwen3_omni_sft", _omni, make_examples, HEARD, published="tiny_omni:published"
    ),
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
    ("ep2", "tiles"),
    ("cp2 ep2", "sigmoid"),
}

# (parallel, model) that validation refuses, by a part of its message.
NO_EXPERTS = "in a model without experts"
NEEDS_SP = "needs sequence parallel"
REFUSED = {
    **{
        (parallel, model): NO_EXPERTS
        for parallel in ("ep2", "ep2 etp2", "cp2 ep2")
        for model in (
            *("dense", "gdn", "llava", "windows", "windows omni", "sound", "two-way", "capped", "full heads"),
        )
    },
    **{("tp2", model): NEEDS_SP for model in ("deepstack", "moe", "mtp", "text", "next", "omni", "tiles", "sigmoid")},
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
    for model, built in MODELS.items():
        worst = max(errors[parallel, model] for parallel in PARALLEL if (parallel, model) not in REFUSED)
        refused = sorted({notes.index(note) + 1 for (_, name), note in REFUSED.items() if name == model})
        lines.append(f"| {built.title} | {worst:.1e} | {', '.join(map(str, refused))} |")
    lines += ["", "Refused before anything is loaded, with a message that also says what would work:", ""]
    for number, note in enumerate(notes, 1):
        titles = [row.title for key, row in PARALLEL.items() if note in layout_notes(key)]
        lines.append(f'{number}. {"; ".join(titles)}: "... {note} ..."')
    lines += ["", "Parallel layouts:", "", *(f"- {row.title}" for row in PARALLEL.values())]
    return "\n".join(lines) + "\n"


def layout_notes(parallel: str) -> set[str]:
    """Why some models are refused under a parallel layout."""
    return {note for (name, _), note in REFUSED.items() if name == parallel}


BEGIN, END = "<!-- table: written by the tests -->\n", "<!-- end of table -->\n"


def written_table(page: str) -> str:
    """The table in docs/parallelism.md."""
    return page.split(BEGIN)[1].split(END)[0]


def replace_table(page: str, made: str) -> str:
    """docs/parallelism.md with another table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + made + END + rest.split(END)[1]
