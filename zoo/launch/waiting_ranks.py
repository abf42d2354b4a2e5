"""Ranks that are started before their recipe is planned: they import what they need meanwhile, and wait for it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zoo.config.compose import save_recipe
from zoo.config.schema import Recipe
from zoo.launch.callback_copies import copied
from zoo.launch.rank_group import RankGroup, rank_group
from zoo.subprocesses import module_command


class WaitingRanks:
    """The ranks of a run as child processes of this one."""

    def __init__(self, group: RankGroup, config: Path) -> None:
        self._group, self._config = group, config

    def train(self, recipe: Recipe, messages: list[str]) -> int:
        """Have them train; returns the exit code. `messages`: see `run_ranks`."""
        save_recipe(recipe, self._config)
        return self._group.supervise(messages)


@contextmanager
def waiting_ranks(recipe: Recipe, ranks: int, callbacks: Sequence[Any] = ()) -> Iterator[WaitingRanks]:
    """Start `ranks` ranks; those that run at the end of the block are killed.

    Args:
        recipe: as asked for. Its backend says what the ranks import; the one that is planned follows (`WaitingRanks.train`).
        callbacks: of zoo.train.

    Raises:
        UserError: a callback can't be copied.
    """
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        asked, config, copies = (Path(folder) / name for name in ("asked.yaml", "config.yaml", "callbacks"))
        save_recipe(recipe, asked)
        command = module_command("zoo.launch.rank_main", str(config), "--asked", str(asked))
        if callbacks:
            copies.write_bytes(copied(callbacks))
            command += ["--callbacks", str(copies)]
        with rank_group() as group:
            group.start_all(command, ranks, recipe.engine.threads)
            yield WaitingRanks(group, config)
