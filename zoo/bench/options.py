"""Options of benches: numbers within bounds."""

from __future__ import annotations

from zoo.config.layers.keys import outside, shown_value
from zoo.errors import UserError


class Bounded:
    """Options, a dataclass with numbers as `zoo.config.layers.keys.number` has them: UserError where one is out of bounds."""

    def __post_init__(self) -> None:
        for name, value, bounds in outside(self):
            raise UserError(f"{name}={shown_value(value)}: wanted a whole number {bounds}")
