"""A process that computes rewards: a user's function may hang, exit, print or use the memory up there, and takes no rank along."""

from __future__ import annotations

import contextlib
import inspect
import math
import pickle
import signal
import socket
import sys
from typing import Any, NamedTuple

from zoo.data.media.worker_sockets import MessageSocket
from zoo.errors import UserError, printable
from zoo.rollouts.rewards.named import KEY, Reward, find_reward, is_own
from zoo.subprocesses import find_users_modules
from zoo.types import JsonMapping
from zoo.user_code import calling


class Call(NamedTuple):
    """A reward to compute."""

    reward: int  # number of the reward among those of the process
    answer: str
    references: tuple[str, ...]
    row: int  # number of the row among those that are sent along


class Reply(NamedTuple):
    """What became of a call, or of the start."""

    value: float
    failure: str = ""  # why there is no value


def serve(channel: MessageSocket, seconds: float, names: list[str]) -> None:
    """Import the rewards of these names, reply to that, and then reply to each of the calls that come until the channel is closed.

    Args:
        channel: brings tuples of rows, pickled, and calls.
        seconds: after which a call ends this process, should nobody else do so.
        names: as `find_reward` takes them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    find_users_modules()
    try:
        rewards = [find_reward(name) for name in names]
    except UserError as error:
        channel.send(Reply(math.nan, str(error)))
        return
    channel.send(Reply(math.nan))
    while True:
        (rows, calls), _ = channel.receive(tuple)
        for call in calls:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            reply = called(rewards[call.reward], names[call.reward], call, pickle.loads(rows[call.row]))
            signal.setitimer(signal.ITIMER_REAL, 0)
            channel.send(reply)


def called(reward: Reward, name: str, call: Call, row: dict[str, Any]) -> Reply:
    """The reward's value for a call, or why it has none."""
    try:
        with calling(f"{KEY}={name}"):
            extra = {} if is_own(name) else row["extra"]
            if unknown := _not_taken(reward, extra):
                return Reply(math.nan, f"it takes no argument {unknown!r}, which the row has in `extra`")
            value: Any = reward(call.answer, call.references, row, **extra)
    except BaseException as error:  # of the user's function, whatever it raises
        return Reply(math.nan, printable(f"it raised {type(error).__name__}: {error}", 300))
    try:
        number = (
            math.nan if isinstance(value, str | bytes) else float(value)
        )  # of numbers, bools and tensors of one element
    except Exception:
        number = math.nan
    if not math.isfinite(number):
        return Reply(math.nan, printable(f"it returned {value!r:.200}, and a finite number is wanted", 300))
    return Reply(number)


def _not_taken(reward: Reward, extra: JsonMapping) -> str | None:
    """The first name that a function has no argument for; None where it has all, or does not tell."""
    try:
        arguments = inspect.signature(reward).parameters.values() if extra else ()
    except (TypeError, ValueError):
        return None
    if not extra or any(argument.kind is argument.VAR_KEYWORD for argument in arguments):
        return None
    named = {each.name for each in arguments if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return next((name for name in extra if name not in named), None)


if __name__ == "__main__":
    from zoo.rollouts.rewards import process  # whose classes, not those of __main__, the rank knows

    *names, end = sys.argv[2:]
    with contextlib.suppress(OSError, EOFError):  # the rank has ended
        process.serve(MessageSocket(socket.socket(fileno=int(end))), float(sys.argv[1]), names)
