"""`out=` of generate, eval and score: a file of JSON lines that is whole or the former one, and rows that are kept as they are done."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from zoo.errors import UserError, file_error
from zoo.files import Lines, expanded, write_atomically
from zoo.parallel.world import World
from zoo.types import JsonMapping


class OutFile:
    """The file that a call writes its rows to, at its end.

    Attributes:
        path: the file, links followed; None: there is none.
        kept: a file next to it for the rows that are done meanwhile (`KeptRows`); None: they are not kept.
    """

    def __init__(self, out: str | Path | None) -> None:
        """Raises UserError or OSError for a place that can't be written to."""
        self.path = self.kept = None
        self.is_main = os.environ.get("RANK", "0") == "0"  # of torchrun's ranks, one
        if out is None:
            return
        if not str(out):
            raise UserError("out=: wanted the name of a file")
        path = expanded(out)
        if path.is_dir():
            raise UserError(f"out={out}: it is a folder; wanted the name of a file, such as out={out}/rows.jsonl")
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe
            self.path = path
            return
        self.path = path.resolve()
        if self.is_main:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.kept = _new_file(self.path)
        else:
            self.kept = self.path

    def write(self, rows: Iterable[JsonMapping]) -> None:
        """Write all rows; OSError leaves the former file, and the rows that are kept."""
        if self.path is None or not self.is_main:
            return
        text = "".join(f"{line_of(row)}\n" for row in rows)
        if self.kept is None:
            self.path.write_text(text, encoding="utf-8")
        elif self.kept.read_bytes() == text.encode():  # which takes no more room
            os.replace(self.kept, self.path)
        else:
            write_atomically(self.path, text)

    def rows_kept(self) -> int:
        """How many rows the file beside it has; without any it is removed."""
        if self.kept is None or not self.is_main:
            return 0
        with contextlib.suppress(OSError):
            with self.kept.open("rb") as file:
                count = sum(1 for _ in file)
            if count:
                return count
            self.kept.unlink()
        return 0


@contextmanager
def out_file(out: str | Path | None) -> Iterator[OutFile]:
    """The file of `out` for a call's rows; where the block fails, the message says where those are that were done.

    Raises:
        UserError: the file can't be written.
    """
    try:
        file = OutFile(out)
    except OSError as error:
        raise file_error(error, out) or error from None
    try:
        yield file
    except BaseException as error:
        mistake = file_error(error, file.path) if isinstance(error, OSError) and file.path else error
        count = file.rows_kept()
        where = f"the {count:,} rows that were done are in {file.kept}"
        if isinstance(mistake, UserError) and (count or mistake is not error):
            raise UserError(f"{mistake}; {where}" if count else str(mistake)) from error
        if count:
            print(f"zoo: {where}", file=sys.stderr, flush=True)
        raise
    if file.kept is not None and file.is_main:
        file.kept.unlink(missing_ok=True)


class KeptRows:
    """Writes rows of all ranks to the file beside the one that a call will write, as they are done."""

    def __init__(self, path: str | None, world: World) -> None:
        """`path`: `OutFile.kept`, on every rank; None keeps nothing."""
        self._world, self.wanted = world, path is not None
        self._lines = Lines(Path(path)) if path is not None and world.is_main else None

    def add(self, rows: Mapping[int, JsonMapping]) -> None:
        """This rank's rows by number. Every rank calls it as often as the others.

        Raises:
            OSError: the disk does not take them.
        """
        if not self.wanted:
            return
        everyone: list[Mapping[int, JsonMapping]] = [{} for _ in range(self._world.size)]
        dist.all_gather_object(everyone, dict(rows))
        if self._lines is not None:
            by_number = {number: row for of_rank in everyone for number, row in of_rank.items()}
            for _, row in sorted(by_number.items()):
                self._lines.write(line_of(row))


def line_of(row: JsonMapping) -> str:
    """A row as a line of JSON."""
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # odd bytes of a file's name
        return json.dumps(row)
    return text


def _new_file(path: Path) -> Path:
    """A new empty file beside `path`: rows that an earlier call has kept stay."""
    number = 1
    while True:
        name = f"{path.stem}.unfinished{'' if number == 1 else f'-{number}'}{path.suffix}"
        try:
            path.with_name(name).touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return path.with_name(name)
