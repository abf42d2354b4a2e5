"""The settings of a run that hold afterwards: how rows were read, whoever asks its model more of them, or serves it.

A checkpoint of a run has them in its recipe. A folder that a run has exported has them in FILE, beside the files of the processor,
which go by them as far as their formats can say it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from zoo.config.compose import is_saved_recipe
from zoo.config.entries import FORMS, DataEntry, parse_entry
from zoo.config.files import read_recipe
from zoo.config.layers.layer import Layer, escaped, merge_into, nested
from zoo.config.locate import Place
from zoo.config.schema import DataConfig, EmbedConfig, PackingConfig, Recipe
from zoo.errors import ConfigError
from zoo.files import expanded
from zoo.model.embedding_files import MODULES, stated_settings
from zoo.records import Check, is_object, read_record, reading_back
from zoo.types import JsonMapping, JsonObject

FILE = "zoo_settings.json"
BUDGET, LOSS = "packing.budget", "train.loss"
EMBED = tuple(f"embed.{item.name}" for item in fields(EmbedConfig))  # of embedding models alone, as is their LOSS
# Keys of data that say which rows there are, serve training, or are about the machine. All others hold afterwards.
NOT_KEPT = (
    "train", "eval", "outside_root", "shuffle", "lookahead", "augment", "augment_variants", "blank_answers", "bundled", "cache_mb",
    "workers", "encode_in_workers", "ahead_mb", "row_seconds", "row_mb",
)  # fmt: skip
NOT_EXPORTED = ("root", "urls", "on_error")  # of the rows at hand: none of a stranger's business
KEPT = tuple(item.name for item in fields(DataConfig) if item.name not in NOT_KEPT)
FORM = ("format", "columns")  # of an entry: what its rows look like
# Of an entry as of data.
SHARED = tuple(item.name for item in fields(DataEntry) if item.name in KEPT and item.name != "root")
READING = (*FORM, "root", *SHARED)  # of an entry: how its rows are read


@dataclass(frozen=True)
class RunSettings:
    """How a run read its rows.

    Attributes:
        origin: what they are of, for messages.
        values: dotted key of a recipe -> value.
        form: `format` and `columns` of all training rows, where these have the same.
        entries: where its rows came from; empty where only an export is known.
        rows: the keys of a recipe that say which rows it was trained and evaluated on; empty where that is not known.
    """

    origin: str = ""
    values: JsonMapping = field(default_factory=dict)
    form: JsonMapping = field(default_factory=dict)
    entries: tuple[DataEntry, ...] = ()
    rows: JsonMapping = field(default_factory=dict)

    @property
    def layer(self) -> Layer:
        """What they set in a recipe: the budget of tokens is no limit where rows above it would be refused, as nothing else depends on it then."""
        values = dict(self.values)
        if BUDGET in values and values.get("data.overlong", "error") == "error":
            values[BUDGET] = max(values[BUDGET], PackingConfig().budget)
        tree: JsonObject = {}
        for key, value in values.items():
            merge_into(tree, nested(key, escaped(value)))
        return Layer(self.origin, tree)


NONE = RunSettings()


def settings_of(source: Place) -> RunSettings:
    """The settings of the run that a checkpoint or an exported folder comes from; `NONE` where no run is known.

    Raises:
        ConfigError: they can't be read.
    """
    if source.kind == "run":
        config = source.folder / "config.yaml"
        return _from_config(config, source.folder.parent.parent) if config.is_file() else NONE
    run = source.folder.absolute().parent  # an export may lie in a run's folder
    config, around = run / "config.yaml", NONE
    if source.kind == "hf" and (run / "checkpoints").is_dir() and config.is_file() and is_saved_recipe(config):
        around = _from_config(config, run)
    if not (source.files / FILE).is_file():  # weights of another tool
        stated = stated_settings(source.files) if around is NONE else {}
        return RunSettings(str(source.files / MODULES), stated) if stated else around
    return replace(_from_export(source), entries=around.entries, rows=around.rows)


def _from_config(config: Path, run: Path) -> RunSettings:
    with reading_back(config, "take a copy of the run's, or remove it"):
        return _from_tree(read_recipe(str(config)).tree, f"the run {run}")


def settings_of_recipe(recipe: Recipe) -> RunSettings:
    """The settings of a recipe's run."""
    data = {item.name: getattr(recipe.data, item.name) for item in fields(DataConfig)}
    tree = {"data": data, "packing": asdict(recipe.packing), "embed": asdict(recipe.embed)}
    tree["train"] = {"eval_rows": recipe.train.eval_rows, "loss": recipe.train.loss}
    return _from_tree(tree, "the recipe")


def write_settings(settings: RunSettings, folder: Path) -> None:
    """Write FILE into an exported folder: no path of this machine is in it."""
    values = {key: value for key, value in settings.values.items() if _name(key) not in NOT_EXPORTED}
    form = {} if _is_code(settings.form) else dict(settings.form)
    record = {"settings": values, "rows": form}
    text = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / FILE).write_text(f"{text}\n", encoding="utf-8")


def as_overrides(settings: RunSettings) -> list[str]:
    """How media and texts become tokens and labels, as overrides of a recipe: what lengths, files and errors mean is left out."""
    values = {
        key: value for key, value in settings.values.items() if _name(key) not in (*NOT_EXPORTED, "overlong", "budget")
    }
    return [f"{key}={json.dumps(escaped(value))}" for key, value in values.items()]


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _is_code(form: JsonMapping) -> bool:
    """Whether a format is a function of somebody's, which no folder may name."""
    return form.get("format") not in (None, *FORMS)


def _from_tree(tree: JsonMapping, origin: str) -> RunSettings:
    """The settings of a recipe as nested dicts; unknown keys are ignored."""
    data, packing, train = (tree.get(name) or {} for name in ("data", "packing", "train"))
    values = {f"data.{name}": data[name] for name in KEPT if name in data}
    if "budget" in packing:
        values[BUDGET] = packing["budget"]
    if train.get("loss") == "embed":
        embed = tree.get("embed") or {}
        values |= {LOSS: "embed", **{key: embed[_name(key)] for key in EMBED if _name(key) in embed}}
    entries = {
        name: tuple(parse_entry(entry, f"data.{name}") for entry in data.get(name) or () if entry != "auto")
        for name in ("train", "eval")
    }
    values |= {f"data.{name}": value for name, value in _common(entries["train"], SHARED).items()}
    rows = {f"data.{name}": data[name] for name in ("train", "eval", "outside_root") if name in data}
    rows |= {"train.eval_rows": train["eval_rows"]} if train.get("eval_rows") else {}
    form = _common(entries["train"], FORM)
    return RunSettings(origin, values, form, (*entries["train"], *entries["eval"]), rows)


def _common(entries: tuple[DataEntry, ...], names: tuple[str, ...]) -> JsonObject:
    """Values that all entries share."""
    common: JsonObject = {}
    for name in names:
        first, *others = [getattr(entry, name) for entry in entries] or [None]
        if first is not None and all(other == first for other in others):
            common[name] = dict(first) if isinstance(first, Mapping) else first
    return common


def _from_export(source: Place) -> RunSettings:
    path = source.files / FILE
    hint = "take the file away, or export the run again"
    fields: dict[str, Check] = {"settings": is_object, "rows": is_object}
    record = read_record(path, fields, ("settings", "rows"), hint=hint, error=ConfigError)
    values, form = record["settings"], record["rows"]
    if type(values.get(BUDGET, 1)) is not int or _is_code(form):
        raise ConfigError(f"{path}: no settings of a run; {hint}")
    taken = [f"data.{name}" for name in KEPT if name not in NOT_EXPORTED] + [BUDGET, *EMBED]
    taken += [LOSS] if values.get(LOSS) == "embed" else []
    entry = parse_entry({"path": ".", **{name: form[name] for name in FORM if name in form}}, str(path))
    values = {key: value for key, value in values.items() if key in taken}
    return RunSettings(f"the run that wrote {source.folder}", values, _common((entry,), FORM))


def source_of(entry: DataEntry) -> tuple[object, ...]:
    """What two entries of the same rows have in common."""
    path = None if entry.path is None else str(expanded(entry.path).absolute())
    return path, entry.hub, entry.name, entry.split
