"""
usage: zoo speak CHECKPOINT ROWS out=FOLDER [key=value ...]

Says a model's answers to rows, with its talker: FOLDER gets rows.jsonl, whose rows data.train takes as targets of a talker,
speech/N.npy (codes: frames, codebooks) and audio/N.wav. CHECKPOINT is a Hugging Face folder or hub id, zoo's own weights, or the folder or
checkpoint of a run that trained the talker. ROWS is as zoo generate has it; a row may name its speaker.

  speaker=NAME           who speaks, in the place of the rows' speakers
  answers=model          rows: say the rows' own answers
  audio=true             false: no wav files
  max_rows=N batch=16    the first N rows only; rows answered at once
  max_new_tokens=256 temperature=0 top_p=1 seed=0         of the answer's tokens, as zoo generate has them
  talker_temperature=0.9 talker_top_k=50 talker_top_p=1   of codes; temperature 0: the most likely ones (greedy)
  talker_repetition_penalty=1.05 talker_max_new_tokens=4096
  nproc=N                any key of the recipe (`zoo show --schema`)
"""

from __future__ import annotations

from collections.abc import Sequence

from zoo.cli.arguments import split_flags, split_places
from zoo.errors import UserError
from zoo.types import JsonObject

_NUMBERS: dict[str, type[int] | type[float]] = {
    **dict.fromkeys(("max_new_tokens", "seed", "batch", "max_rows", "talker_top_k", "talker_max_new_tokens"), int),
    **dict.fromkeys(("temperature", "top_p", "talker_temperature", "talker_top_p", "talker_repetition_penalty"), float),
}
OWN = ("out", "speaker", "answers", "audio", *_NUMBERS)  # keys that are none of a recipe's


def run(arguments: Sequence[str]) -> int:
    """Say the answers to rows."""
    _, rest = split_flags(arguments, ())
    places, values, overrides = split_places(rest, OWN)
    if len(places) not in (1, 2):
        raise UserError(
            f"{len(places)} of CHECKPOINT and ROWS given: zoo speak CHECKPOINT ROWS out=FOLDER [key=value ...]"
        )
    if not values.get("out"):
        raise UserError("no out=: wanted out=FOLDER, which rows, codes and audios are written to")
    options: JsonObject = dict(values)
    for key in _NUMBERS.keys() & values.keys():
        try:
            options[key] = _NUMBERS[key](values[key])
        except ValueError:
            kind = "whole number" if _NUMBERS[key] is int else "number"
            raise UserError(f"{key}={values[key]}: wanted a {kind}") from None
    if (audio := values.get("audio", "true")) not in ("true", "false"):
        raise UserError(f"audio={audio}: wanted true or false")
    options["audio"] = audio == "true"

    from zoo.tools.speaking.speak import UNSPOKEN, speak

    results = speak(places[0], places[1] if len(places) == 2 else None, overrides, in_process=True, **options)
    spoken = sum(UNSPOKEN not in row for row in results)
    print(f"{spoken} of {len(results)} rows spoken in {options['out']}")
    return 0
