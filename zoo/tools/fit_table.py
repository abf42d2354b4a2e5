"""Which published sizes fit which GPUs: the plan of each size on 1 to 16 GPUs of a kind, a line of a table for each size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile

from zoo.config.architecture import num_experts
from zoo.config.compose import about, load_recipe
from zoo.config.files import read_size, size_names
from zoo.config.gpus import find_gpu, near_gpus
from zoo.config.recipes.matrix import LORA, SFT, RecipeParts, names_in
from zoo.config.schema import Recipe
from zoo.errors import ConfigError
from zoo.planner.activations import typical_row
from zoo.planner.layouts import first_fit
from zoo.planner.memory import Model, memory
from zoo.planner.plan import model_of
from zoo.types import JsonObject

COUNTS = {1: "1x", 2: "2x", 4: "4x", 8: "8x", 16: "2x8x"}  # GPUs -> what stands before their kind
KINDS = ("h100", "h200")  # where no hardware is given
WAYS = (SFT, LORA)  # where no recipe is given: all weights, and adapters
MOMENTS = {"bf16": "m", "fp8": "M"}
RECOMPUTE = {"selective": "r", "full": "R"}
LEGEND = (
    "A cell: GB of the fullest GPU, and the layout that is expected to be fastest: sizes of tp, pp, cp and ep (the rest is data "
    "parallel),\nm: AdamW's moments in bf16, M: in 8 bits, r: selective recompute, R: full; -: nothing fits. 16 GPUs are two nodes "
    "of eight."
)


@dataclass(frozen=True)
class Cell:
    """A size on some GPUs of a kind: the layout that the planner takes; None where nothing fits."""

    recipe: str
    size: str
    gpu: str
    gpus: int
    bytes: float | None
    chosen: Recipe | None

    def __str__(self) -> str:
        if self.chosen is None or self.bytes is None:
            return "-"
        sizes = {name: getattr(self.chosen.parallel, name) for name in ("tp", "pp", "cp", "ep")}
        cuts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        marks = MOMENTS.get(self.chosen.train.exp_avg_sq_dtype, "") + RECOMPUTE.get(self.chosen.engine.recompute, "")
        return " ".join(filter(None, [f"{self.bytes / 1e9:.0f}", *cuts, marks]))

    def as_dict(self) -> JsonObject:
        """The cell for machines."""
        layout = None
        if self.chosen is not None:
            train, parallel = self.chosen.train, self.chosen.parallel
            layout = {name: getattr(parallel, name) for name in ("tp", "pp", "cp", "ep", "sp")}
            layout |= {"recompute": self.chosen.engine.recompute, "moments": train.exp_avg_sq_dtype}
            layout |= {"optimizer_offload_fraction": train.optimizer_offload_fraction}
        names = ("recipe", "size", "gpu", "gpus")
        return {**{name: getattr(self, name) for name in names}, "bytes": self.bytes, "layout": layout}


def find_kind(hardware: str) -> str:
    """The name of a kind of GPU; ConfigError for a number of them, and for what is no GPU."""
    gpu = find_gpu(hardware)
    if gpu is None:
        count, _, kind = hardware.rpartition("x")
        if count and find_gpu(kind):
            raise ConfigError(f"hardware={hardware}: --table counts the GPUs itself; name the kind: hardware={kind}")
        near = near_gpus(hardware)
        hint = f"nearest: {', '.join(near)}" if near else "`zoo list` shows the names"
        raise ConfigError(f"hardware={hardware}: no such GPU; {hint}; any other by its memory: 80gb")
    return hardware


def sizes_of(recipe: str | None, size: str | None = None) -> list[tuple[str, str]]:
    """(recipe, published size) of every line; of all families, by all weights and by adapters, where no recipe is given.

    Raises:
        ConfigError: there is no such size among them.
    """
    names = [name for way in WAYS for name in _recipes_by(way)] if recipe is None else [recipe]
    pairs = [(name, size_of_recipe) for name in names for size_of_recipe in published_sizes(name)]
    if size is None:
        return pairs
    if not any(size_of_recipe == size for _, size_of_recipe in pairs):
        known = ", ".join(dict.fromkeys(size_of_recipe for _, size_of_recipe in pairs))
        raise ConfigError(f"size={size}: no published size of these recipes: {known}")
    return [pair for pair in pairs if pair[1] == size]


def published_sizes(recipe: str) -> list[str]:
    """The published sizes that a recipe is for, of those of its family: dense ones, say, where another recipe is for those with experts."""
    facts = about(recipe)
    family, recipe_size = str(facts["family"]), facts["published_size"]
    names = [name for name in size_names(family) if not name.startswith("tiny")]
    published = _published_by_recipes()[family]
    if recipe_size not in published:
        return names
    return [name for name in names if recipe_size == _nearest(family, name, published)]


@cache
def _published_by_recipes() -> dict[str, list[str]]:
    """Family -> the published sizes that its recipes of supervised fine-tuning name."""
    published: dict[str, list[str]] = defaultdict(list)
    for facts in map(about, _recipes_by(WAYS[0])):
        published[facts["family"]].append(str(facts["published_size"]))
    return published


def _recipes_by(way: str) -> list[str]:
    """The recipes of one of WAYS, one for each family."""
    return [RecipeParts(family, SFT, None if way == SFT else way).name for family in names_in("families")]


def _nearest(family: str, size: str, published: Sequence[str]) -> str:
    """The size among `published` that is most like `size`: with experts or without, then by its name."""

    def likeness(other: str) -> tuple[bool, int]:
        alike = _has_experts(family, size) == _has_experts(family, other)
        return alike, len(list(takewhile(lambda pair: pair[0] == pair[1], zip(size, other, strict=False))))

    return max(published, key=likeness)


@cache
def _has_experts(family: str, size: str) -> bool:
    return num_experts(read_size(family, size).tree["model"]["arch"]) > 0


def line(
    recipe: str, size: str, kind: str, overrides: Sequence[str] = (), shares: Mapping[str, float] | None = None
) -> list[Cell]:
    """The cells of a size on 1 to 16 GPUs of a kind."""
    model: Model | None = None
    cells = []
    for gpus, prefix in COUNTS.items():
        resolved = load_recipe(recipe, [f"size={size}", f"hardware={prefix}{kind}", *overrides])
        model = model or model_of(resolved)
        row = typical_row(resolved, model.cost, **(shares or {}))
        chosen = first_fit(model, resolved, gpus, row)
        needed = None
        if chosen is not None:
            fused = chosen.engine.precision == "bf16"
            needed = max(stage.total for stage in memory(model, chosen, row, gpus, fused=fused))
        cells.append(Cell(resolved.recipe, size, kind, gpus, needed, chosen))
    return cells


def text_lines(lines: Iterator[list[Cell]]) -> Iterator[str]:
    """The lines of the tables, one table for each kind of GPU, as they come."""
    kind = None
    for cells in lines:
        recipe, size, gpu = cells[0].recipe, cells[0].size, find_gpu(cells[0].gpu)
        if gpu is not None and gpu.name != kind:
            kind = gpu.name
            yield f"\n{kind}, {gpu.memory_gb:g} GB"
            yield _aligned("recipe and size", [f"{count} GPU{'s' * (count > 1)}" for count in COUNTS])
        yield _aligned(f"{recipe} {size}", [str(cell) for cell in cells])


def _aligned(head: str, cells: Sequence[str]) -> str:
    widths = (7, 12, 16, 19, 0)
    return f"{head:<36} " + " ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
