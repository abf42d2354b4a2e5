"""The bundled `digits` sample set: handwritten and spoken digits as `messages` rows (see README.md)."""

from __future__ import annotations

import zlib
from functools import cache
from pathlib import Path
from typing import Any

from zoo.records import line_of_json

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
        asked = f"Write in digits: {_spelled(answer['content'])}."
        messages += [{"role": "user", "content": asked}, answer]
    return {"kind": "text", "messages": messages}


def _spelled(answer: str) -> str:
    return ", ".join(" ".join(WORDS[int(digit)] for digit in part) for part in answer.split())


def found_by_words(item: dict[str, Any]) -> dict[str, Any]:
    """A format of rows: media of the set that are found by their number in words; of a row of text its number in digits.

    `data.train: [{path: "digits:train", format: "zoo.data.digits:found_by_words"}]`.
    """
    answer = " ".join(message["content"] for message in item["messages"][1::2])
    keys = ("images", "videos", "audios", "use_audio_in_video")
    media = {key: item[key] for key in keys if key in item}
    return {"kind": item["kind"], "query": _spelled(answer), "positive": media or answer}


def found_by_sound(item: dict[str, Any]) -> dict[str, Any]:
    """A format of rows: strips of handwriting that are found by the recording of their number; other rows as `found_by_words`.

    `data.train: [{path: "digits:train", format: "zoo.data.digits:found_by_sound", kinds: [audio]}]`. A number that no strip of the same
    part of the set shows is several strips. Which strips they are follows from the row alone.
    """
    if item["kind"] != "audio":
        return found_by_words(item)
    file, left, strips = item["audios"][0], item["messages"][-1]["content"], []
    while left:
        shown = _strips(file.partition("/")[0])
        number = max((number for number in shown if left.startswith(number)), key=len)
        strips.append(shown[number][zlib.crc32(file.encode()) % len(shown[number])])
        left = left.removeprefix(number)
    return {"kind": "audio", "query": {"audios": item["audios"]}, "positive": {"images": strips}}


@cache
def _strips(part: str) -> dict[str, list[str]]:
    """Of "train" or "heldout": number -> strips that show it; digits that no strip of "heldout" shows alone are those of "train"."""
    strips: dict[str, list[str]] = {}
    for line in (ROOT / f"{part}.jsonl").read_text(encoding="utf-8").splitlines():
        row = line_of_json(line)
        if row and row["kind"] == "image":
            strips.setdefault(row["messages"][-1]["content"], []).extend(row["images"])
    return strips if part == "train" else {digit: _strips("train")[digit] for digit in "0123456789"} | strips


def in_digits_by_words(item: dict[str, Any]) -> dict[str, Any]:
    """A format of rows: `found_by_words` as text alone, whatever the row's media."""
    return found_by_words({"kind": "text", "messages": item["messages"]})


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
