"""A recipe for a user's data and model, with what was found of both beside each line: `zoo init`."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zoo.checkpoint.selection import repaired_source
from zoo.config.compose import about, load_recipe
from zoo.config.derived import alignment
from zoo.config.devices import gpu_count, gpu_memory, gpu_name
from zoo.config.entries import BUNDLED, DataEntry, is_bundled
from zoo.config.files import read_size, root_recipes, size_names
from zoo.config.layers.layer import escaped
from zoo.config.locate import Place, is_hub_id, look, read_arch, read_state
from zoo.config.recipes.matrix import LORA, matrix, recipe_names
from zoo.config.recipes.published import arch_of_hub
from zoo.config.schema import DataConfig, Recipe
from zoo.config.validate import validate
from zoo.data.errors import RowError
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.sizes import SampleSize
from zoo.data.sample import Sample
from zoo.data.sources.formats.labelled_media import LABELLED
from zoo.data.sources.formats.published_sets import SET_FORMATS
from zoo.data.sources.mixture import SampleId
from zoo.data.sources.references import files_of
from zoo.data.sources.row_set import RowSet, open_rows, spread_over_kinds
from zoo.data.sources.rows import Row
from zoo.errors import ConfigError, UserError, size
from zoo.model.build import assemble
from zoo.model.meta_model import family_of
from zoo.registry import families
from zoo.types import JsonObject

LOOKED_AT = 200  # rows, spread over all, whose media and lengths are looked at
_FULL_TUNING = 9  # bytes that training all weights takes, for each byte of weights in bf16: gradients, AdamW's state
_OPEN_BUDGET = 10**8  # tokens, so that no row is refused while it is measured
_PLAIN = re.compile(r"[A-Za-z./~][\w./~-]*", re.ASCII)  # what YAML reads as a text without quotes


@dataclass(frozen=True)
class FoundData:
    """What rows of an entry of data.train are, spread over all of them."""

    entry: JsonObject  # as a recipe has it
    rows: list[Row]  # the good ones of those looked at
    total: int
    bad: list[RowError]
    bundled: bool

    @property
    def kinds(self) -> Counter[str]:
        """How many of the rows have which media; text for those without any."""
        return Counter("+".join(sorted(row.media)) or "text" for row in self.rows)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
        forms = ", ".join(sorted({row.form for row in self.rows}))
        return f"{self.total:,} rows in the form {forms}; {len(self.rows)} of them were looked at: {kinds}"


@dataclass(frozen=True)
class FoundModel:
    """Which recipe a model is trained by, and what is known of its weights."""

    recipe: str  # trains all weights
    adapters: str | None  # the recipe of the same family that trains adapters
    init: str  # as model.init has it
    source: Place | None  # where the weights lie, if they are here
    description: str  # in a few words


@dataclass(frozen=True)
class Measured:
    """Lengths of rows, in tokens, as a recipe's model has them."""

    longest: int = 0
    longest_text: int = 0  # of rows without media
    over: int = 0  # rows that are longer than the recipe's budget
    bad: list[RowError] = field(default_factory=list)


def look_at_data(name: str) -> FoundData:
    """Rows of a file, a folder, a bundled set or a data set of the hub: LOOKED_AT, and one of each further kind of media.

    Raises:
        UserError: there is no such thing, or none of the rows can be used.
    """
    name = f"{name}:train" if name in BUNDLED else name
    hub = is_hub_id(name) and not is_bundled(name) and not Path(name).suffix
    entry: JsonObject = {"hub": name} if hub else {"path": name}
    try:
        data = _look(entry)
    except UserError as error:
        try:
            data = _look({**entry, "split": "train"})
        except UserError:
            raise error from None
    if not data.rows:  # of the formats that have to be named, the one that reads most rows
        named = [_look({**data.entry, "format": form}) for form in (*LABELLED, *SET_FORMATS)]
        data = max([data, *named], key=lambda candidate: len(candidate.rows))
    if not data.rows:
        why = f", the first: {data.bad[0]}" if data.bad else ""
        raise UserError(f"data={name}: none of its rows can be used{why}")
    return data


def _look(entry: JsonObject) -> FoundData:
    """The first rows of an entry."""
    bad: list[RowError] = []
    every = sorted({kind for family in families().values() for kind in family.modalities})
    settings = DataConfig(outside_root=True, urls=True, on_error="skip")
    rows = open_rows([DataEntry(**entry)], settings, every, bad.append)
    total, good = len(rows) + len(bad), list[Row]()
    for number in spread_over_kinds(rows, LOOKED_AT):
        try:
            row = rows.row(SampleId(number))
            row.check_files()
            good.append(row)
        except RowError as error:
            bad.append(error)
    return FoundData(entry, good, total, bad, is_bundled(entry.get("path", "")))


def look_at_model(name: str, data: FoundData) -> FoundModel:
    """The recipe that fits a model: a folder, a run, a hub id, a recipe's name, or "tiny" for random weights.

    Raises:
        UserError: nothing that is known, or a model that doesn't take the data's media.
    """
    if name == "tiny":
        name = _recipe_for(data)
    if name in recipe_names():
        return FoundModel(name, None, "random", None, "random weights")
    source = look(name)
    if source is None and not is_hub_id(name):
        raise UserError(
            f"model={name}: no checkpoint folder, run, hub id or recipe; `zoo list` shows the recipes, and model=tiny "
            "takes random weights"
        )
    saved = None
    if source is None:
        known = arch_of_hub(name, "model")
        if known.arch is None:
            raise UserError(f"model={name}: no published size, and {known.source}; give a folder")
        arch = known.arch
    else:
        arch = read_arch(source.files, f"model={name}")
        saved = read_state(source.folder)["model"].get("family") if source.kind == "run" else None
    family = saved if isinstance(saved, str) else family_of(arch).name
    recipes = [recipe for recipe in root_recipes() if about(recipe)["family"] == family]
    fitting = [recipe for recipe in recipes if _kind(recipe) == arch.get("model_type")] or recipes
    if not fitting:
        raise UserError(f"model={name}: no recipe comes with zoo for the family {family}")
    weights = f", {size(_bytes(source))} of weights" if _bytes(source) else ""
    adapters = matrix()[fitting[0]]._replace(adapter=LORA).name
    return FoundModel(fitting[0], adapters, name, source, families()[family].title + weights)


def prefers_adapters(model: FoundModel) -> bool:
    """Whether training all weights is more than this machine holds, or nothing is known of the weights' size."""
    if model.adapters is None:
        return False
    weights = _bytes(model.source)
    memory = gpu_count() * gpu_memory() if gpu_count() else 16e9
    return not weights or weights * _FULL_TUNING > 0.8 * memory


def draft(data: FoundData, model: FoundModel, adapters: bool, out: Path) -> str:
    """The text of a recipe that trains a model on data; it resolves as it is.

    Raises:
        UserError: none of the rows can be used by the model.
    """
    base = model.adapters if adapters and model.adapters else model.recipe
    overrides = [f"model.init={json.dumps(model.init)}"]
    recipe = load_recipe(base, overrides if model.init != "random" else [f"size={_tiny(base)}"])
    measured = Measured()
    if model.init == "random" or model.source:
        try:
            measured = _measure(recipe, data)
        except UserError:  # templates of speech recognition have no room for a question
            if data.entry.get("format") not in LABELLED:
                raise
            data = _look({**data.entry, "prompt": ""})
            measured = _measure(recipe, data)
    lines = [
        f"# Written by `zoo init`. It trains with: zoo train recipe={out}",
        f"# What it takes: zoo plan recipe={out}. Packed rows as a picture: zoo inspect recipe={out}",
        f"base: {base}  # {about(base)['description']}",
    ]
    if model.init == "random":
        lines.append(f"size: {_tiny(base)}  # random weights; `zoo list` shows the published sizes")
    else:
        parts = ", ".join(families()[recipe.model.family].parts[:-1])
        lines += ["model:", f"  init: {_yaml(model.init)}  # {model.description}"]
        lines.append(f"  # freeze: [{parts}]  # parts that stay as they are")
    lines += ["", *_data_lines(data, measured), *_length_lines(recipe, data, measured), *_more_lines(recipe, out)]
    text = "\n".join(lines) + "\n"
    with tempfile.TemporaryDirectory(prefix="zoo-init-") as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        load_recipe(path)
    return text


def _data_lines(data: FoundData, measured: Measured) -> list[str]:
    (key, value), *others = data.entry.items()
    share = 0.05 if data.total >= 400 else 0.1 if data.total >= 200 else 0.2
    lines = ["data:", "  train:", f"    # {data}"]
    if data.bundled:
        lines.append(f"    - {value}")
    else:
        lines += [f"    - {key}: {_yaml(value)}", *(f"      {name}: {_yaml(setting)}" for name, setting in others)]
        held_out = f"held_out: {share}  # share of the rows that are not trained on, for evaluation"
        lines.append(f"      {held_out}" if data.total >= 50 else f"      # {held_out}")
    bad = [*data.bad, *measured.bad]
    if bad:
        why = f"{len(bad)} rows that were looked at can't be used; bad_rows.jsonl will list them"
        lines.append(f"  on_error: skip  # {why}")
        lines += [f"    # {' '.join(str(error).split())[:160]}" for error in bad[:3]]
    media = (setting for row in data.rows for setting in (*row.images, *row.videos, *row.audios))
    if any(isinstance(file, str) for setting in media for file in files_of(setting)):
        lines.append("  # root: FOLDER  # what media paths are relative to; default: the folder of the file")
    return lines


def _length_lines(recipe: Recipe, data: FoundData, measured: Measured) -> list[str]:
    """Keys under which the rows fit that were measured."""
    budget = recipe.packing.budget
    comment = "tokens of a row, and the most of one sample"
    if measured.longest:
        comment = f"the longest row that was looked at has {measured.longest:,} tokens"
    if measured.longest <= budget:
        return [f"# packing: {{budget: {budget}}}  # {comment}"]
    if measured.longest_text <= budget and _shrinks(recipe, data):
        rows = f"{measured.over} of those looked at"
        return [f"  overlong: shrink  # media of rows over packing.budget are made smaller: {rows}"]
    wanted = -(-measured.longest // 512) * 512
    return ["packing:", f"  budget: {wanted}  # {comment}; more tokens take more memory"]


def _more_lines(recipe: Recipe, out: Path) -> list[str]:
    train = recipe.train
    length = f"steps: {train.steps}" if train.steps else f"epochs: {train.epochs:g}"
    gpus = f"{gpu_count()} x {gpu_name()} are here" if gpu_count() else "no GPU is here"
    return [
        "",
        f"# train: {{{length}, lr: {train.lr:g}, global_batch: {train.global_batch}}}  # what it is now",
        f"# hardware: 8xh200  # {gpus}, and zoo train takes what is here; another machine is named so",
        "run:",
        f"  dir: {_yaml(f'runs/{out.stem}')}",
    ]


def _measure(recipe: Recipe, data: FoundData) -> Measured:
    """Lengths of the rows that were looked at, by the model's own processor."""
    alone = {**dict.fromkeys(("tp", "pp", "vpp", "cp", "ep", "etp"), 1), "sp": False, "stage_layers": [], "plan": []}
    align = recipe.packing.align or alignment(recipe)
    recipe = validate(recipe.replace({"parallel": alone, "packing.align": align, "data.train": ["digits:train"]}), 1)
    processor = assemble(recipe, repaired_source(recipe)).processor
    source = SampleSource.of_rows(RowSet([data.rows], ["rows"]), processor, recipe.data, budget=_OPEN_BUDGET)
    bad: list[RowError] = []
    lengths: list[tuple[int, bool]] = []
    for number, row in enumerate(data.rows):
        try:
            sized: SampleSize | Sample | None = source.measure(SampleId(number))
            # As of compressed audio: what is wrong with a row shows when it is encoded.
            sized = source.sample(SampleId(number)) if sized is None and not lengths else sized
        except RowError as error:
            if not (data.bundled and error.cause == "modality"):  # those are skipped
                bad.append(error)
            continue
        if sized is not None:
            lengths.append((sized.length, bool(row.media)))
    if len(bad) == len(data.rows):
        raise UserError(f"none of the {len(bad)} rows looked at can be used by this model, the first: {bad[0]}")
    longest = max((length for length, _ in lengths), default=0)
    text = max((length for length, media in lengths if not media), default=0)
    over = sum(length > recipe.packing.budget for length, _ in lengths)
    return Measured(longest, text, over, bad)


def _shrinks(recipe: Recipe, data: FoundData) -> bool:
    """Whether the rows that were looked at fit the recipe's budget once their media are made smaller."""
    processor = assemble(recipe, repaired_source(recipe)).processor
    settings = recipe.replace({"data.train": ["digits:train"], "data.overlong": "shrink"}).data
    try:
        source = SampleSource.of_rows(RowSet([data.rows], ["rows"]), processor, settings, budget=recipe.packing.budget)
    except ConfigError:  # a processor that can't
        return False
    for number in range(len(data.rows)):
        try:
            source.measure(SampleId(number))
        except RowError as error:
            if error.cause == "overlong":
                return False
    return True


def _recipe_for(data: FoundData) -> str:
    """The recipe for random weights whose family takes the data's media, and as little else as may be."""
    media = set().union(*(row.media for row in data.rows))
    fitting = [family for family in families().values() if media <= set(family.modalities)]
    ranked = sorted(fitting, key=lambda family: (len(family.modalities), -len(size_names(family.name))))
    for family in ranked:
        for name in root_recipes():
            if about(name)["family"] == family.name and about(name)["tiny_size"] is None:
                return name
    raise UserError(f"no family that comes with zoo takes {' and '.join(sorted(media))}")


def _tiny(recipe: str) -> str:
    return about(recipe)["tiny_size"] or "tiny"


def _kind(recipe: str) -> str | None:
    """The model_type of the recipe's published size."""
    known = about(recipe)
    if known["published_size"] is None:
        return None
    arch = (read_size(known["family"], known["published_size"]).tree.get("model") or {}).get("arch") or {}
    return arch.get("model_type")


def _bytes(source: Place | None) -> int:
    """Bytes of the weights that lie there; 0 where none do."""
    if source is None or source.kind == "run":
        return 0
    return sum(file.stat().st_size for file in source.weights.glob("*.safetensors"))


def _yaml(text: str) -> str:
    """A text as YAML and the recipe's references have it."""
    text = str(escaped(text))
    words: Sequence[str] = ("null", "true", "false", "yes", "no", "on", "off", "~", ".")
    return text if _PLAIN.fullmatch(text) and text.lower() not in words else json.dumps(text, ensure_ascii=False)
