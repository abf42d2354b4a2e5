"""
usage: zoo generate CHECKPOINT "PROMPT" [image=FILE] [audio=FILE] [video=FILE] [key=value ...]
       zoo generate CHECKPOINT rows=ROWS [key=value ...]
       zoo generate CHECKPOINT

Prints a model's answer to a prompt, writes its answers to rows, one JSON object a line, or holds a chat on a terminal. CHECKPOINT is
a Hugging Face folder or hub id, zoo's own weights, or the folder or checkpoint of a run (with adapters, too). ROWS is whatever
data.train takes: a file, a folder, digits:heldout, or an entry such as '{hub: org/set, split: test}'; auto: the rows that the run held
out. Media are read with the run's settings.

  image=FILE             a file that the prompt is about; repeat it for several
  out=FILE               where to write the answers of rows; default: standard output. A run that fails leaves the former file, and
                         says where the answers are that it had made
  max_new_tokens=256     most tokens of an answer
  temperature=0          0: the most likely tokens (greedy); above: drawn at random
  top_p=1 seed=0         draw from the most likely tokens alone that together reach top_p
  batch=16 max_rows=N    rows answered at once; the first N rows only
  nproc=N parallel.tp=2  any key of the recipe (`zoo show --schema`)

In a chat a line is a question, with files as image=FILE before its text; an empty line ends it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from zoo.cli.arguments import split_flags
from zoo.errors import UserError, printable_lines
from zoo.types import JsonMapping, JsonObject

USAGE = 'zoo generate CHECKPOINT "PROMPT" [image=FILE ...], or zoo generate CHECKPOINT rows=FILE'
FILES = ("image", "audio", "video")
_ALIKE = {
    **dict.fromkeys(("picture", "img", "images", "photo", "pic", "image_path", "image_file", "image_url"), "image"),
    **dict.fromkeys(("sound", "wav", "speech", "audios", "audio_path", "audio_file"), "audio"),
    **dict.fromkeys(("videos", "clip", "movie", "video_path", "video_file"), "video"),
}  # what others call a file of the prompt
_KEY = re.compile(r"[A-Za-z_][\w.\[\]]*=")
_FILE = re.compile(r"(image|audio|video)=(?:\"([^\"]+)\"|(\S+))\s*")


OPTIONS: dict[str, type[int] | type[float]] = {
    **dict.fromkeys(("max_new_tokens", "seed", "batch", "max_rows"), int),
    **dict.fromkeys(("temperature", "top_p"), float),
}


def run(arguments: Sequence[str]) -> int:
    """Answer a prompt or rows, or chat."""
    _, rest = split_flags(arguments, ())
    places, overrides, values, files = split(rest)
    if not places or len(places) > 2:
        raise UserError(f"{len(places)} of CHECKPOINT and PROMPT given: {USAGE}")
    path, prompt = places[0], places[1] if len(places) == 2 else None
    rows, out = values.pop("rows", None), values.pop("out", None)
    files = {kind: [_there(kind, file) for file in paths] for kind, paths in files.items()}
    if rows is None and prompt is None:
        if not sys.stdin.isatty():
            raise UserError(f"no prompt and no rows, and standard input is no terminal to chat on: {USAGE}")
        if out is not None:
            raise UserError(f"out={out}: a chat is not written to a file; leave it out, or give a prompt or rows")
        return _chat(path, overrides, values)
    if rows is not None and (prompt is not None or any(files.values())):
        raise UserError(f"rows={rows} has prompts and files of its own; leave the others out: {USAGE}")

    from zoo.tools.generate import generate
    from zoo.tools.out_file import line_of

    options: JsonObject = {**files, **values}
    answers = generate(path, rows, overrides, prompt=prompt, out=out, in_process=True, **options)
    if rows is None:
        print(_for_terminal(answers[0]["text"]), flush=True)
        if (note := _cut(answers[0]["token_ids"], answers[0]["finish"])) is not None:
            print(f"zoo: {note}", file=sys.stderr)
        return 0
    if out is None:
        sys.stdout.write("".join(f"{line_of(answer)}\n" for answer in answers))
    else:
        print(f"{len(answers)} answers written to {out}")
    return 0


def split(arguments: Sequence[str]) -> tuple[list[str], list[str], JsonObject, dict[str, list[str]]]:
    """Arguments in their places, overrides of the recipe, options by name, and files by kind."""
    places, overrides, values = list[str](), list[str](), dict[str, object]()
    files: dict[str, list[str]] = {kind: [] for kind in FILES}
    for text in arguments:
        argument = text.removeprefix("--") if _KEY.match(text.removeprefix("--")) else text
        key, _, value = argument.partition("=")
        if (kind := _ALIKE.get(key.lower())) is not None and _KEY.match(argument):
            raise UserError(f"{argument}: no such key; a file that the prompt is about is given as {kind}={value}")
        if key in FILES and _KEY.match(argument):
            files[key].append(value)
        elif key in OPTIONS and _KEY.match(argument):
            try:
                values[key] = OPTIONS[key](value)
            except ValueError:
                kind = "whole number" if OPTIONS[key] is int else "number"
                raise UserError(f"{value!r} is no {kind}") from None
        elif key in ("rows", "out", "prompt") and _KEY.match(argument):
            if key == "prompt":
                places.append(value)
            else:
                values[key] = value
        elif _KEY.match(argument) and " " not in argument and not Path(argument).exists():
            overrides.append(argument)
        else:
            places.append(text)
    return places, overrides, values, files


def _cut(tokens: Sequence[int], finish: str) -> str | None:
    """That an answer has no end, and whether it only repeats itself; None for one that has."""
    if finish != "length":
        return None
    note = f"the answer is cut after {len(tokens)} tokens (max_new_tokens)"
    half = list(tokens[-len(tokens) // 2 :])
    for period in range(1, min(8, len(half) // 4) + 1):
        if half[period:] == half[:-period]:
            return f"{note}, and only repeats itself: the model may not have learnt to answer such prompts"
    return note


def _there(kind: str, path: str) -> str:
    from zoo.files import expanded

    if not expanded(path).is_file():
        raise UserError(f"{kind}={path}: no such file")
    return str(expanded(path))


def _for_terminal(answer: str) -> str:
    """An answer without codes that a terminal would obey; into a file or a pipe it goes unchanged."""
    return printable_lines(answer) if sys.stdout.isatty() else answer


def _chat(path: str, overrides: Sequence[str], values: JsonMapping) -> int:
    """Questions from the terminal until an empty line, the end of input or Ctrl-C."""
    from zoo.generation.sampling import Sampling
    from zoo.tools.generate import chat

    taken = ("max_new_tokens", "temperature", "top_p", "seed")
    sampling = Sampling(**{key: value for key, value in values.items() if key in taken})
    with chat(path, overrides, sampling) as talk:
        print(f"{path} is loaded. Ask, with files as image=FILE before the text; an empty line ends the chat.")
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                return 0
            if not line:
                return 0
            files: dict[str, list[str]] = {kind: [] for kind in FILES}
            try:
                text = line
                while match := _FILE.match(text):  # files stand before the text
                    files[match[1]].append(_there(match[1], match[2] or match[3]))
                    text = text[match.end() :]
                print(_for_terminal(talk.ask(text, files)))
            except UserError as error:
                print(f"zoo: {error}", file=sys.stderr)
