"""Whether a run may go on from a checkpoint: its recipe and its rows are those that were saved, or what is otherwise is allowed.

`zoo.config.resume` lists what a recipe may say otherwise, `zoo.data.sources.identity` says what rows are known by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.config.files import read_recipe
from zoo.config.resume import Change, changes, refuse
from zoo.config.schema import Recipe
from zoo.data.loading.sample_source import SampleSource
from zoo.data.sources.identity import FORM, Known, difference, of_part
from zoo.data.sources.streams import RowStream
from zoo.engine.distributed.object_group import agreed
from zoo.engine.distributed.world import World
from zoo.engine.train.dataloader import Feed
from zoo.errors import ConfigError

# Changes after which a place in the data means nothing.
_ORDER = ("run.seed", "data.shuffle", "data.train")


@dataclass(frozen=True)
class Rows:
    """What is known of a run's rows.

    Attributes:
        known: goes into state.json, by data.train and data.eval; {} on ranks but the first.
        sizes: rows of each part of data.train in the checkpoint, where rows have been added since; None where none have.
        anew: whether the data begin anew, as more or fewer rows or another order were allowed.
        others: whether other rows were allowed, so that what the checkpoint knows of their lengths is void.
        told: sentences for the person who watches.
    """

    known: dict[str, Any]
    sizes: list[int | None] | None = None
    anew: bool = False
    others: bool = False
    told: list[str] = field(default_factory=list)


def allowed_changes(
    checkpoint: Path, state: Mapping[str, Any], recipe: Recipe, model: Mapping[str, Any]
) -> list[Change]:
    """What is otherwise than in the recipe that a checkpoint was saved with, and is allowed.

    Args:
        state: its state.json.
        model: the description of the model that the recipe makes.

    Raises:
        ConfigError: something else is otherwise; the message names the keys, both values, and how to allow it.
    """
    config = checkpoint / "config.yaml"
    saved = read_recipe(str(config.absolute())).tree if config.is_file() else {}
    found = changes(saved, recipe, rows_known=_rows_known(state))
    seen = {change.key for change in found}
    of_model = _of_model(state["model"], model)
    found += [
        one for one in of_model if not any(key == one.key or key.startswith(f"{one.key}.") for key in seen)
    ]
    refuse(str(checkpoint), found, recipe)
    if ("lora" in state["model"]) != ("lora" in model):  # neither has what the other trains
        what = "adapters" if "lora" in state["model"] else "no adapters"
        raise ConfigError(
            f"{checkpoint} holds {what}, and lora.rank={recipe.lora.rank} wants it the other way, which can't be allowed; start "
            f"from its weights with model.init={checkpoint} in another run.dir"
        )
    return found


def _of_model(theirs: Any, ours: Any, prefix: str = "model") -> Iterator[Change]:
    """Differences of two descriptions (`zoo.engine.checkpoint.sharded.describe`), under the keys of a recipe."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for name in sorted({*theirs, *ours}):
            key = "lora" if (prefix, name) == ("model", "lora") else f"{prefix}.{name}"
            yield from _of_model(theirs.get(name), ours.get(name), key)
    elif theirs != ours:
        yield Change(prefix, theirs, ours)


def known_rows(feed: Feed) -> dict[str, Any]:
    """What the rows of a run are known by, as plain values."""
    return {"form": FORM} | {
        key: [
            _known(name, part).as_dict()
            for name, part in zip(source.rows.names, source.rows.parts, strict=True)
        ]
        for key, source in _sources(feed)
    }


def check_rows(
    checkpoint: Path,
    state: Mapping[str, Any],
    feed: Feed,
    recipe: Recipe,
    allowed: Sequence[Change],
) -> Rows:
    """Hold the rows that there are against those of a checkpoint; the first rank does, and tells all.

    Raises:
        UserError: rows are other ones, without leave; the message names the source, and the row if it is known.
    """

    def look() -> Rows:
        order = any(change.key.startswith(_ORDER) and not change.free for change in allowed)
        return _compared(checkpoint, state, feed, recipe, anew=order)

    return agreed(look)


def first_rows(feed: Feed, world: World) -> Rows:
    """Those of a run that has no checkpoint yet."""
    return Rows(known_rows(feed) if world.is_main else {})


def _rows_known(state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint says which rows it knew, as today's zoo can compare them."""
    return bool((state.get("known_rows") or {}).get("form") == FORM)


def _sources(feed: Feed) -> list[tuple[str, SampleSource]]:
    held_out = [] if feed.held_out is None else [("data.eval", feed.held_out)]
    return [("data.train", feed.source), *held_out]


def _known(name: str, part: Any) -> Known:
    return Known(name, None) if isinstance(part, RowStream) else of_part(name, part)


def _compared(checkpoint: Path, state: Mapping[str, Any], feed: Feed, recipe: Recipe, *, anew: bool) -> Rows:
    if not _rows_known(state):
        text = f"{checkpoint} is of an earlier zoo and does not say which rows it knew: only their number is compared"
        return Rows(known_rows(feed), anew=anew, told=[text])
    saved, others = state["known_rows"], False
    told: list[str] = []
    sizes: list[int | None] | None = None
    for key, source in _sources(feed):
        before = [Known(**{**one, "digests": tuple(one["digests"])}) for one in saved.get(key, [])]
        why = _difference(key, before, source, state, recipe)
        if why is not None:
            change = Change(key, None, None)
            if not change.accepted(recipe):
                raise ConfigError(
                    f"{key}: {why}, so the rows are not those of {checkpoint}; put them back, allow others with "
                    f"run.accept_changes=[{key}], or use another run.dir"
                )
            told.append(f"{key}: {why}, which run.accept_changes allows")
            if key == "data.train":
                others, anew = True, anew or [one.rows for one in before] != source.rows.sizes
                told[-1] += "; the data begin anew" if anew else "; they go on at the same place"
            continue
        grown = list(_grown(before, source))
        if grown:
            told.append(f"{key} has grown: {', '.join(grown)}")
            if key == "data.train":
                told[-1] += (
                    "; the epoch at hand goes on with the rows it began with, the new ones join in the next"
                )
                sizes = [one.rows for one in before]
    return Rows(known_rows(feed), None if anew else sizes, anew, others, told)


def _difference(
    key: str, before: Sequence[Known], source: SampleSource, state: Mapping[str, Any], recipe: Recipe
) -> str | None:
    """Why a source does not begin with the rows that were known, part by part."""
    rows = source.rows
    if len(rows.parts) < len(before):
        return f"{before[len(rows.parts)].name} is gone"
    streams = state["data"].get("streams", {})
    for number, (known, part) in enumerate(zip(before, rows.parts, strict=False)):
        if (known.rows is None) != isinstance(part, RowStream):
            return f"{known.name} is read another way"
        if isinstance(part, RowStream):
            saved = streams.get(str(number)) if key == "data.train" else None
            why = part.difference(saved) if saved is not None else None
        else:
            fewer = key == "data.eval" and recipe.train.eval_rows is not None
            why = difference(known, part, fewer)
        if why is not None:
            return f"{rows.names[number]}: {why}"
    return None


def _grown(before: Sequence[Known], source: SampleSource) -> Iterator[str]:
    rows = source.rows
    for known, name, size in zip(before, rows.names, rows.sizes, strict=False):
        if known.rows is not None and size is not None and size > known.rows:
            yield f"{name} from {known.rows} to {size} rows"
    for name, size in zip(rows.names[len(before) :], rows.sizes[len(before) :], strict=True):
        yield f"{name} with {'a stream' if size is None else f'{size} rows'}"
