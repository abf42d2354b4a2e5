"""Whether a run may resume from a checkpoint: its recipe and rows are the saved ones, or the differences are allowed.

`zoo.config.resume` lists what may change in a recipe; `zoo.data.sources.identity` defines how rows are recognised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zoo.checkpoint.selection import Chosen
from zoo.config.locate import STATE
from zoo.config.resume import Change, changes_from, refuse
from zoo.config.schema import Recipe
from zoo.data.loading.sample_source import SampleSource
from zoo.data.sources.identity import DIGEST_VERSION, RowDigests, difference, digests_of_rows
from zoo.data.sources.streams import RowStream
from zoo.errors import ConfigError
from zoo.logging.messages import at_change
from zoo.logging.run_log import RunLog
from zoo.parallel.object_group import agreed
from zoo.records import reading_back
from zoo.training.dataloader import RunData
from zoo.types import JsonMapping, JsonObject

# Changes after which a position in the data means nothing.
_ORDER = ("run.seed", "data.shuffle", "data.train")


@dataclass(frozen=True)
class KnownRows:
    """A run's rows, compared with those of its checkpoint."""

    known: JsonObject  # digests by which rows are recognised, by data.train and data.eval; {} on ranks but the first
    sizes: list[int | None] | None = None  # rows of each part of data.train, where the checkpoint had fewer
    restart: bool = False  # the data start over, because more or fewer rows or another order were allowed
    replaced: bool = False  # other rows were allowed, so that the lengths saved in the checkpoint are void
    messages: list[str] = field(default_factory=list)  # sentences for the person who watches


def allowed_changes(checkpoint: Path, state: JsonMapping, recipe: Recipe, model: JsonMapping) -> list[Change]:
    """The allowed differences from the recipe that a checkpoint was saved with.

    Args:
        state: the checkpoint's state.json.
        model: the description of the recipe's model (`zoo.checkpoint.loading.describe`).

    Raises:
        ConfigError: another difference; the message names the keys, both values, and how to allow it.
    """
    saved, changes = changes_from(checkpoint, recipe)
    listed = {change.key for change in changes}
    for change in _model_changes(state["model"], model):
        if not any(key == change.key or key.startswith(f"{change.key}.") for key in listed):
            changes.append(change)
    refuse(str(checkpoint), changes, recipe, saved.get("recipe"))
    if ("lora" in state["model"]) != ("lora" in model):  # the trained parameters of one are missing in the other
        held = "adapters" if "lora" in state["model"] else "no adapters"
        raise ConfigError(
            f"{checkpoint} holds {held}, and lora.rank={recipe.lora.rank} asks for the opposite, which can't be allowed; start "
            f"from its weights with model.init={checkpoint} in another run.dir"
        )
    return changes


def _model_changes(theirs: object, ours: object, prefix: str = "model") -> Iterator[Change]:
    """Differences of two descriptions (`zoo.checkpoint.loading.describe`), under the keys of a recipe."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for name in sorted({*theirs, *ours}):
            key = "lora" if (prefix, name) == ("model", "lora") else f"{prefix}.{name}"
            yield from _model_changes(theirs.get(name), ours.get(name), key)
    elif theirs != ours:
        yield Change(prefix, theirs, ours)


def known_rows(data: RunData) -> JsonObject:
    """Digests of a run's rows, by which a resumed run recognises them, as plain values."""
    known: JsonObject = {"form": DIGEST_VERSION}
    for key, source in _sources(data):
        known[key] = [
            (RowDigests(name, None) if isinstance(part, RowStream) else digests_of_rows(name, part)).as_dict()
            for name, part in zip(source.rows.names, source.rows.parts, strict=True)
        ]
    return known


def check_rows(
    checkpoint: Path, state: JsonMapping, data: RunData, recipe: Recipe, allowed: Sequence[Change]
) -> KnownRows:
    """Compare a run's rows with those of its checkpoint: the first rank does, and all ranks get the result.

    Raises:
        UserError: rows differ and that is not allowed; the message names the source, and the row if it is known.
    """
    reordered = any(change.key.startswith(_ORDER) and not change.free for change in allowed)
    return agreed(lambda: _compared(checkpoint, state, data, recipe, restart=reordered))


def log_differences(
    log: RunLog, done: int, changed: Sequence[Change], rows: KnownRows, chosen: Chosen, notes: Sequence[str] = ()
) -> None:
    """Log what differs from the checkpoint that a run resumes from, what was found damaged, and `notes` on the rows."""
    for change in changed:
        log.event("changed", done, key=change.key, old=change.old, new=change.new)
    for text in (*notes, *at_change(changed)):
        log.say(text)
    for text in rows.messages:
        log.event("rows", done, told=text)
        log.say(text)
    for name, why in chosen.passed_over.items():
        log.event("damaged_checkpoint", done, checkpoint=name, why=why)
    for name, outcome in chosen.side_files.items():
        log.event("damaged_file", done, file=name, outcome=outcome)


def _sources(data: RunData) -> list[tuple[str, SampleSource]]:
    held_out = [] if data.held_out is None else [("data.eval", data.held_out)]
    return [("data.train", data.source), *held_out]


@reading_back(STATE, "take another checkpoint")
def _compared(checkpoint: Path, state: JsonMapping, data: RunData, recipe: Recipe, *, restart: bool) -> KnownRows:
    saved, replaced = state.get("known_rows", {}), False
    if saved.get("form") != DIGEST_VERSION:
        raise ConfigError(
            f"{checkpoint} does not say, in the form that is compared here ({DIGEST_VERSION}), which rows it knew; start from its "
            f"weights with model.init={checkpoint} in another run.dir"
        )
    messages: list[str] = []
    sizes: list[int | None] | None = None
    for key, source in _sources(data):
        before = [RowDigests(**{**known, "digests": tuple(known["digests"])}) for known in saved.get(key, [])]
        why = _difference(key, before, source, state, recipe)
        if why is not None:
            change = Change(key, None, None)
            if not change.accepted(recipe):
                raise ConfigError(
                    f"{key}: {why}, so the rows are not those of {checkpoint}; put them back, allow others with "
                    f"run.accept_changes=[{key}], or use another run.dir"
                )
            messages.append(f"{key}: {why}, which run.accept_changes allows")
            if key == "data.train":
                replaced, restart = True, restart or [known.rows for known in before] != source.rows.sizes
                messages[-1] += "; the data start over" if restart else "; they continue at the same place"
            continue
        if grown := list(_grown(before, source)):
            messages.append(f"{key} has grown: {', '.join(grown)}")
            if key == "data.train":
                messages[-1] += "; the current epoch keeps the rows it began with, the new ones join in the next"
                sizes = [known.rows for known in before]
    return KnownRows(known_rows(data), None if restart else sizes, restart, replaced, messages)


def _difference(
    key: str, before: Sequence[RowDigests], source: SampleSource, state: JsonMapping, recipe: Recipe
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
            why = difference(known, part, key == "data.eval" and recipe.train.eval_rows is not None)
        if why is not None:
            return f"{rows.names[number]}: {why}"
    return None


def _grown(before: Sequence[RowDigests], source: SampleSource) -> Iterator[str]:
    rows = source.rows
    for known, name, size in zip(before, rows.names, rows.sizes, strict=False):
        if known.rows is not None and size is not None and size > known.rows:
            yield f"{name} from {known.rows} to {size} rows"
    for name, size in zip(rows.names[len(before) :], rows.sizes[len(before) :], strict=True):
        yield f"{name} with {'a stream' if size is None else f'{size} rows'}"
