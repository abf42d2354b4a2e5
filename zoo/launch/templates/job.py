"""What all batch files share: the job's size and command, the grace period, and a shell script that starts a node's ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.files import write_atomically
from zoo.parallel.signals import LOST, PREEMPTED
from zoo.types import JsonObject

KILLED = 137  # exit code of a process that SIGKILL ended, as shells have it
RESTARTS = 3  # after LOST or KILLED, which may be the run's own fault; after PREEMPTED there is no limit
PORT = 29500  # of MASTER_PORT, as torchrun has it
_PLAIN = re.compile(r"[\w./:=@%+,-]+")  # a word of a shell that needs no quotes


@dataclass(frozen=True)
class Job:
    """A run to be submitted."""

    recipe: Recipe  # validated
    name: str  # of the run folder
    command: str  # `zoo train` with its arguments, quoted for a shell
    nodes: int
    ranks_of_node: int

    @classmethod
    def from_recipe(cls, recipe: Recipe, arguments: Sequence[str], ranks: int) -> Job:
        """`zoo train` with these arguments, on the machine of the validated recipe."""
        assert recipe.run.dir is not None  # derived by validate
        quoted = (text if _PLAIN.fullmatch(text) else "'" + text.replace("'", "'\\''") + "'" for text in arguments)
        nodes = recipe.machine.nodes
        return cls(recipe, Path(recipe.run.dir).name, f"zoo train {' '.join(quoted)}", nodes, ranks // nodes)

    @property
    def label(self) -> str:
        """The name in lower-case letters, digits and hyphens, short enough for names of pods (RFC 1123)."""
        return f"zoo-{re.sub('[^a-z0-9]+', '-', self.name.lower())}"[:40].strip("-")

    def grace(self, margin: int) -> int:
        """Seconds from a signal to the end of the machine: run.save_within, and a margin."""
        return math.ceil(self.recipe.run.save_within) + margin

    def shared_folders(self, working: str) -> list[str]:
        """Folders that all nodes must see: the working directory, and the first part of an absolute run.dir outside it."""
        folder = Path(self.recipe.run.dir or ".")
        inside = not folder.is_absolute() or folder.is_relative_to(working)
        return [working] if inside else [working, str(Path(*folder.parts[:2]))]

    def script(self, node: str, master: str) -> str:
        """A bash script that runs one node's ranks, passes SIGTERM on to them, and ends with zoo's exit code.

        torchrun would end with 1 in any case, and kill ranks that save 30 s after a signal. The code is that of a rank
        which failed by itself, before that of ranks which left because of it.

        Args:
            node: a shell's expression for the node's number.
            master: the same for the address of the first node.
        """
        if self.nodes == 1:
            return f"exec {self.command}\n"
        return _NODE.format(
            node=node, master=master, port=PORT, ranks=self.nodes * self.ranks_of_node, each=self.ranks_of_node,
            last=self.ranks_of_node - 1, command=self.command, lost=LOST,
        )  # fmt: skip

    def write(self, suffix: str, text: str) -> Path:
        """Write a batch file to the current folder; its path.

        Raises:
            UserError: a file of that name exists.
        """
        path = Path(f"{self.name}{suffix}")
        if path.exists():
            raise UserError(f"{path} is there already; move it away, or give another run.dir")
        write_atomically(path, text)
        return path


def as_yaml(comments: Sequence[str], *documents: JsonObject) -> str:
    """Documents in YAML under lines of comment; texts of several lines stand as blocks."""
    dumped = (
        yaml.dump(document, Dumper=_BlockDumper, sort_keys=False, width=10**4, allow_unicode=True)
        for document in documents
    )
    return "".join(f"# {line}\n" for line in comments) + "---\n".join(dumped)


class _BlockDumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and nothing by reference."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_BlockDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)

CODES = (
    f"Exit code {PREEMPTED} (saved on a signal) starts the job again, {LOST} and {KILLED} (a rank died, hangs or was killed) do so "
    f"at most {RESTARTS} times"
)

_NODE = """\
node={node}
export MASTER_ADDR={master} MASTER_PORT={port} WORLD_SIZE={ranks} LOCAL_WORLD_SIZE={each}
for local in $(seq 0 {last}); do
    RANK=$((node * {each} + local)) LOCAL_RANK=$local {command} &
    ranks="${{ranks:-}} $!"
done
trap 'kill -TERM $ranks 2>/dev/null' TERM
code=0
for rank in $ranks; do
    while kill -0 $rank 2>/dev/null; do wait $rank; done # a signal ends a wait, not what it waits for
    wait $rank
    ended=$?
    if [ $ended -ne 0 ] && {{ [ $code -eq 0 ] || [ $code -eq {lost} ]; }}; then code=$ended; fi
done
exit $code
"""
