"""The rows of a bad step, packed again from where the data stood before it and compared with the run's record."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.model.build import Assembly
from zoo.tools.inspection.rows import PackedRow, packed_rows
from zoo.training.bad_steps import records
from zoo.types import JsonObject


@dataclass(frozen=True)
class Step:
    """A bad step, as `bad_steps/step_N.json` has it."""

    file: Path
    record: JsonObject  # what the file holds

    @classmethod
    def read(cls, path: Path, number: int | None = None) -> Step:
        """A step's file, or step `number` of a run folder; raises UserError where there is none."""
        file = path if number is None else path / records.FOLDER / f"step_{number}.json"
        return cls(file, records.read(file))

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return self.file.parent.parent

    @property
    def number(self) -> int:
        """Number of the step."""
        number: int = self.record["step"]
        return number

    @property
    def title(self) -> str:
        """What was wrong, in a line."""
        return f"step {self.number} was not applied: {self.record['why']}"


def replayed(step: Step, recipe: Recipe, assembly: Assembly) -> list[PackedRow]:
    """The step's rows, in the order of its file, each with its rank and loss as a note.

    Raises:
        UserError: the data don't give the rows any more that the step had.
    """
    wanted: list[tuple[tuple[str, ...], str]] = []  # sources of a row's samples, and a note
    for record in step.record["rows"]:
        sources = tuple(sample["source"] for sample in record["samples"])
        note = f"rank {record['rank']}, loss {_number(record['loss'])}"
        # Samples that stand side by side are a row each.
        wanted += [(part, note) for part in ([sources] if recipe.packing.mode == "thd" else zip(sources))]
    replays: dict[tuple[str, ...], list[PackedRow]] = defaultdict(list)
    for row in packed_rows(recipe, assembly, len(wanted), step.record["data"]):
        replays[tuple(segment.source for segment in row.segments)].append(row)
    rows = []
    for sources, note in wanted:
        if not replays[sources]:
            raise UserError(
                f"{step.file}: the data are not those of the run any more: no packed row has {', '.join(sources[:3])}"
                f"{' ...' if len(sources) > 3 else ''}; put the files of data.train back as they were"
            )
        rows.append(replace(replays[sources].pop(), note=note))
    return rows


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def table(step: Step) -> str:
    """What was wrong, and each row with its samples."""
    lines = [step.title, "", "rank  loss        tokens  samples"]
    for row in step.record["rows"]:
        sources = [sample["source"] for sample in row["samples"]]
        more = f" and {len(sources) - 6} more" if len(sources) > 6 else ""
        lines.append(f"{row['rank']:>4}  {_number(row['loss']):<10} {row['tokens']:>7}  {', '.join(sources[:6])}{more}")
    return "\n".join(lines)
