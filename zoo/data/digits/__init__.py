"""The bundled `digits` sample set: handwritten and spoken digits as `messages` rows (see README.md)."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent  # holds train.jsonl, heldout.jsonl and media/
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def with_wrong_answer(item: dict[str, Any]) -> dict[str, Any]:
    """A format of rows: a row of the set as a preference pair, whose rejected answer has another digit in each place.

    `data.train: [{path: "digits:train", format: "zoo.data.digits:with_wrong_answer"}]`. Which digits they are follows from the
    row alone.
    """
    answer = item["messages"][-1]["content"]
    shift = zlib.crc32(repr(item).encode()) % 9 + 1
    wrong = "".join(str((int(character) + shift) % 10) if character.isdecimal() else character for character in answer)
    return {**item, "rejected_response": wrong}


def with_label(item: dict[str, Any]) -> dict[str, Any]:
    """A format of rows: a row of the set as a labelled answer, half of them desirable and the others wrong in each place.

    `data.train: [{path: "digits:train", format: "zoo.data.digits:with_label"}]`.
    """
    if zlib.crc32(repr(item).encode()) // 9 % 2:
        return {**item, "label": True}
    wrong = {**item["messages"][-1], "content": with_wrong_answer(item)["rejected_response"]}
    return {**item, "messages": [*item["messages"][:-1], wrong], "label": False}


def in_words(item: dict[str, Any]) -> dict[str, Any]:
    """A format of rows: a row of the set as text alone, which asks to write a number in digits that is spelled out.

    `data.train: [{path: "digits:train", format: "zoo.data.digits:in_words"}]`. Answers are the row's own.
    """
    messages = []
    for answer in item["messages"][1::2]:
        spelled = ", ".join(" ".join(WORDS[int(digit)] for digit in part) for part in answer["content"].split())
        messages += [{"role": "user", "content": f"Write in digits: {spelled}."}, answer]
    return {"kind": "text", "messages": messages}


def in_words_with_wrong_answer(item: dict[str, Any]) -> dict[str, Any]:
    """A format of rows: `in_words` as a preference pair, as `with_wrong_answer` makes them."""
    return with_wrong_answer(in_words(item))


def spoken(item: dict[str, Any]) -> dict[str, Any]:
    """A format of rows: a row of the set whose last answer is spoken, in codes of a made-up codec that a tiny talker can learn.

    `data.train: [{path: "digits:train", format: "zoo.data.digits:spoken"}]`. Each character is three frames of four codes from 0 to 31.
    """
    answer = item["messages"][-1]["content"]
    said = [
        [(ord(letter) * (2 * book + 3) + 7 * part) % 32 for book in range(4)] for letter in answer for part in range(3)
    ]
    return {**item, "speech": said, "speaker": "ethan"}


def in_one_codebook(item: dict[str, Any]) -> dict[str, Any]:
    """A format of rows: as `spoken`, in the first of each frame's codes alone."""
    row = spoken(item)
    return {**row, "speech": [frame[0] for frame in row["speech"]]}
