"""Arguments that a replaced forward is called with and does nothing about: with a value, they are refused."""

from __future__ import annotations

from collections.abc import Mapping


def refuse_unused(where: str, arguments: Mapping[str, object]) -> None:
    """A forward that left out what it is asked for would compute something else in silence.

    Args:
        where: the class or function, for the message.
        arguments: by name; None, False and 0 ask for nothing.

    Raises:
        NotImplementedError: one of them asks for something.
    """
    asked = [
        name
        for name, value in arguments.items()
        if value is not None and not (isinstance(value, bool | int | float) and not value)
    ]
    if asked:
        raise NotImplementedError(
            f"{where} does not do what it is asked for by {', '.join(sorted(asked))}; call it without, or use the forward "
            "that it replaces"
        )
