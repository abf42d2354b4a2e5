"""The whole recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from dataclasses import replace as with_parts
from typing import Any, ClassVar

from zoo.config.entries import object_entries, split_objects
from zoo.config.layers.keys import (
    ALWAYS,
    given_names,
    is_whole,
    number,
    section,
    setting,
    shown_value,
    unknown_hint,
)  # fmt: skip
from zoo.config.layers.layer import reading_objects
from zoo.config.layers.tree import replaced
from zoo.config.schema import conditions
from zoo.config.schema.data import DataConfig, DistillConfig, EmbedConfig, LoraConfig, ModelConfig, PackingConfig
from zoo.config.schema.rl import RlConfig
from zoo.config.schema.run import (
    EngineConfig,
    HubConfig,
    LogConfig,
    MachineConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from zoo.errors import ConfigError
from zoo.types import JsonMapping, JsonObject

# A key and its default with the bounds of a number stay on one line.
# fmt: off


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """A whole run. `zoo train` resolves one from defaults, recipe, size, hardware and overrides."""

    recipe: str = setting("custom", when=ALWAYS)
    """name or path of the recipe file it came from"""
    size: str | None = setting(None, when=ALWAYS)
    """a size that `zoo list` shows; default: published size on a GPU, tiny without"""
    hardware: str | None = setting(None, when=ALWAYS)
    """8xh200, 2x8xh100, 4xa100-40, 8x80gb, cpu, auto, a path; default: auto on a GPU"""
    nproc: int | None = number(None, 1, 4096, when=ALWAYS)
    """ranks started on this machine; default: one a GPU, or nproc_cpu without"""
    nproc_cpu: int = number(1, 1, 4096, when=conditions.OPEN_RANKS)
    """ranks started where there is no GPU, at most one a core"""
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    embed: EmbedConfig = field(default_factory=EmbedConfig)
    rl: RlConfig = field(default_factory=RlConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    log: LogConfig = field(default_factory=LogConfig)
    export: bool = setting(True, when=ALWAYS)
    """write a Hugging Face folder (with lora, an adapter) to run.dir/export at the end"""
    max_shard_size: str = setting("5GB", when=(conditions.EXPORT, conditions.WHOLE_WEIGHTS))
    """largest size of a weights file of the export"""
    hub: HubConfig = field(default_factory=HubConfig)

    _set_by_user: ClassVar[frozenset[str] | None] = None  # None: not known
    _composed: ClassVar[bool | None] = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value: Any = getattr(self, item.name)
            kind: Any = item.default_factory
            if is_dataclass(kind) and not isinstance(value, kind):  # type: ignore[arg-type]
                object.__setattr__(self, item.name, _section(item.name, kind, value))

    @property
    def composed(self) -> bool:
        """Whether it is one that `zoo.load_recipe` gave or was copied from one; False: a program built it, and size and hardware wait."""
        if self._composed is not None:
            return self._composed
        lacks_arch = not self.model.arch and self.model.init == ModelConfig.init
        return is_whole(self) and is_whole(self.model) and not lacks_arch

    @property
    def set_by_user(self) -> frozenset[str]:
        """The keys that overrides, the user's file and `replace` have set; of a recipe built by hand those that its program gave."""
        if self._set_by_user is None and not self.composed:
            return frozenset(self._given_keys())
        return self._set_by_user or frozenset()

    def _given_keys(self) -> Iterator[str]:
        names = () if is_whole(self) else given_names(self)  # a copy by dataclasses.replace names all
        for item in fields(self):
            value = getattr(self, item.name)
            if is_dataclass(value) and not isinstance(value, type):
                yield from _given_in(value, f"{item.name}.")
            elif item.name in names or value != item.default:
                yield item.name

    def marked(self, set_by_user: frozenset[str] | None, *, composed: bool) -> Recipe:
        """This recipe, which then has these as `set_by_user` and `composed`."""
        object.__setattr__(self, "_set_by_user", set_by_user)
        object.__setattr__(self, "_composed", composed)
        return self

    @property
    def named_parts(self) -> set[str]:
        """Parts of the model that some key names: an inner part (a tower's merger) among them is no part of its tower then."""
        lora = (*self.lora.parts, *self.lora.whole_parts) if self.lora.rank else ()
        return {*self.model.freeze, *self.train.lr_scale, *lora}

    def replace(self, changes: JsonMapping | None = None, /, **more: Any) -> Recipe:
        """A copy with other values, checked like overrides.

        Args:
            changes: by dotted key, ``{"train.lr": 1e-4, "data.train[0].weight": 2}``, or nested.
            more: by name, a section's as a dict or as its dataclass: ``replace(train={"lr": 1e-4}, nproc=2)``.

        Rows as objects may stand in data.train and data.eval: `zoo.train` writes them to the run folder.

        Raises:
            ConfigError: a key that there is not, or a value that is none of its kind.
        """
        named_changes = {name.replace("__", "."): value for name, value in more.items()}  # data__train=rows
        with reading_objects():
            plain, objects = split_objects({**(changes or {}), **named_changes})
        held = {name: object_entries(getattr(self.data, name), f"data.{name}") for name in ("train", "eval")}
        held = {name: entries for name, entries in held.items() if entries}
        section = plain.get("data", {})
        whole = not isinstance(section, Mapping)  # a DataConfig, which has all keys
        named = {name for name in held if f"data.{name}" in plain or whole or name in section}
        parts: JsonObject = {name: entries for name, entries in held.items() if name not in named} | objects
        emptied: JsonObject = {name: [] for name in held}
        changed, further = replaced(with_parts(self, data=with_parts(self.data, **emptied)), plain)
        changed = with_parts(changed, data=with_parts(changed.data, **parts)) if parts else changed
        further |= {f"data.{name}" for name in objects}
        return changed.marked(self.set_by_user | further, composed=self.composed)


# fmt: on
def _given_in(section: Any, prefix: str) -> Iterator[str]:
    """Dotted keys that a program has given of a section, and of the sections in it."""
    for name in given_names(section):
        value = getattr(section, name)
        yield from _given_in(value, f"{prefix}{name}.") if is_dataclass(value) else (f"{prefix}{name}",)


def _section(name: str, kind: Any, value: object) -> Any:
    """A section of a mapping of its keys."""
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{name}={shown_value(value)}: {name} is a section; zoo.{kind.__name__}(...) or a dict is wanted"
        )
    for key in value:
        if key not in {item.name for item in fields(kind)}:
            raise ConfigError(f"{name}.{key}: no such key; {unknown_hint(Recipe, f'{name}.{key}')}")
    return kind(**value)
