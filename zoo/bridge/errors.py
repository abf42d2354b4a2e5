"""The one error of conversion: a report that lists everything that does not fit."""

from __future__ import annotations

from collections.abc import Iterable

from zoo.errors import UserError

_SHOWN = 20  # problems printed; `BridgeError.problems` holds them all


class BridgeError(UserError):
    """Tensors that do not fit between a checkpoint and a model.

    `problems` has one sentence per tensor, all of them; the message shows the first 20, counts the rest, and ends with
    what `helps`.
    """

    def __init__(self, title: str, problems: Iterable[str], helps: Iterable[str] = ()) -> None:
        self.title = title
        self.problems = list(dict.fromkeys(problems))
        self.helps = list(dict.fromkeys(helps))
        lines = [f"{title}: {len(self.problems)} problem(s)", *self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            lines.append(f"... and {len(self.problems) - _SHOWN} more")
        lines += [f"what helps: {remedy}" for remedy in self.helps]
        super().__init__("\n  ".join(lines))
