"""Answers that a checkpoint gives to rows or to a prompt; `zoo.generate`, and a chat.

The model is zoo's own, under any parallel layout (`zoo.generation`). Greedy answers are those of transformers'
`generate` on the exported folder, token by token.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zoo.checkpoint.selection import language_model
from zoo.config.entries import parse_entry
from zoo.config.layers.layer import Overrides
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.data.sources.formats.choose import Form
from zoo.data.sources.references import Access
from zoo.data.sources.row_set import open_rows
from zoo.data.sources.rows import MEDIA, make_row
from zoo.errors import UserError
from zoo.generation.generator import Generator, load_generator
from zoo.generation.prompts import STAND_IN, with_stand_in, with_stand_ins
from zoo.generation.sampling import Sampling
from zoo.launch.launcher import run_task
from zoo.launch.prepare import world_size
from zoo.logging.result import Model
from zoo.parallel.process_state import preserve_process_state
from zoo.tools.asking import AskedRows, asked, check_counts, for_rows, recipe_of
from zoo.tools.out_file import KeptRows, out_file
from zoo.types import JsonMapping, JsonObject

Media = Any  # a file, an image, an array, bytes; or a list of these


@preserve_process_state()
def generate(
    path: Model,
    rows: AskedRows = None,
    overrides: Overrides = (),
    *,
    prompt: str | None = None,
    image: Media = (),
    audio: Media = (),
    video: Media = (),
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch: int = 16,
    max_rows: int | None = None,
    out: str | Path | None = None,
    in_process: bool = False,
) -> list[JsonObject]:
    """Answer some rows, or one prompt, in separate processes.

    Args:
        path: a checkpoint, as `zoo.evaluate` takes it.
        rows: as `zoo.evaluate` takes them, "auto" for those that the run held out. A row's last answer is left out of its prompt; a
            dict may end with the question.
        overrides: of the recipe, such as `parallel.tp=2`, `packing.budget=16384` or `data.on_error=skip`.
        prompt: one question, in the place of rows.
        image: what it is about, before its text: a file, a PIL image, an array, bytes, or a list of these; and so audio (an array
            without a rate is at 16 kHz) and video (files).
        max_new_tokens: most tokens of an answer.
        temperature: 0 is greedy; above, tokens are drawn at random.
        top_p: draws from the most likely tokens alone that together reach this probability.
        seed: of the draws.
        batch: most prompts that are answered at once.
        max_rows: answer the first so many rows only.
        out: a file to write the result to, as `zoo.evaluate` takes it.
        in_process: a single rank runs in this process, as in the command `zoo generate`.

    Returns:
        One dict per row, in order: `source`, `kind`, `text`, `reference` (the row's own answer, or None), `prompt_tokens`,
        `token_ids` (the end token included) and `finish` ("stop" or "length").

    Raises:
        UserError: no such checkpoint or file, an override that can't run, a bad row (under data.on_error=raise), or a
            prompt that is longer than the model takes.
    """
    if (prompt is None) == (rows is None):
        raise UserError("wanted either rows or a prompt")
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    check_counts(batch=batch, max_rows=max_rows)
    files = {"image": image, "audio": audio, "video": video}
    asked_rows, unanswered = with_stand_ins(rows if prompt is None else [prompt_row(prompt, files)])
    with out_file(out) as file, asked(path, asked_rows, overrides) as recipe:
        most = max_rows or recipe.train.eval_rows or None
        options: JsonObject = {"sampling": asdict(sampling), "batch": batch, "unanswered": unanswered}
        options |= {"max_rows": most, "kept": file.kept and str(file.kept)}
        task, ranks = "zoo.tools.generate:generate_here", world_size(recipe)
        answers: list[JsonObject] = run_task(task, recipe, ranks, options, fresh=not in_process)
        file.write(answers)
        return answers


def generate_here(recipe: Recipe, options: JsonMapping) -> list[JsonObject]:
    """`generate` on this rank, for the rows of data.eval; returns all results on every rank."""
    with load_generator(recipe, Sampling(**options["sampling"]), options["batch"]) as generator:
        entries = [parse_entry(spec, "data.eval") for spec in recipe.data.eval]
        modalities, bad = generator.decoding.assembly.processor.modalities, generator.bad_rows
        rows = open_rows(entries, recipe.data, modalities, bad.handle, max_rows=options["max_rows"], evaluation=True)
        kept = KeptRows(options.get("kept"), generator.decoding.world)
        answers = generator.all(
            rows, range(len(rows)), frozenset(options["unanswered"]), kept.add if kept.wanted else None
        )
        if bad.counts and generator.decoding.world.is_main:
            print(f"rows left out: {bad.summary()}", file=sys.stderr)
        return list(answers.values())


class Chat:
    """A conversation with a loaded model; a failed question leaves it as it was."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._row: JsonObject = {"messages": []}

    def ask(self, text: str, files: Mapping[str, Media]) -> str:
        """The model's answer to a question with files.

        Raises:
            UserError: a file that is missing or broken, or a conversation that is longer than the model takes.
        """
        asked = prompt_row(text, files)
        row = {name: [*self._row.get(name, []), *asked.get(name, [])] for name in ("messages", *MEDIA.values())}
        form = Form(literal_tags=True)  # placeholders of the files stand before the text
        whole = make_row(with_stand_in(row), "", Access(Path(), outside=True), form)
        prompt = self._generator.prompt(whole, answered=False)
        (tokens,) = self._generator.decoding.answer([prompt.sample], [len(row["messages"])])
        answer: str = self._generator.result(prompt, tokens)["text"]
        row["messages"].append({"role": "assistant", "content": answer or STAND_IN})
        self._row = row
        return answer


@contextmanager
def chat(path: str | Path, overrides: Sequence[str], sampling: Sampling) -> Iterator[Chat]:
    """A chat with a checkpoint's model in this process; UserError for more than one rank."""
    source = language_model(path)
    recipe = recipe_of(source, overrides)
    if (ranks := world_size(recipe)) != 1:
        raise UserError(f"a chat runs on one rank, and the recipe asks for {ranks}; set nproc=1")
    with load_generator(validate(for_rows(recipe, []), 1), sampling, 1) as generator:
        yield Chat(generator)


def prompt_row(text: str, files: Mapping[str, Media]) -> JsonObject:
    """A row with a question, the media before its text, files by absolute paths."""
    marks, row = "", dict[str, Any]()
    for kind, media in files.items():
        media = list(media) if isinstance(media, list | tuple) else [media]
        marks += f"<{kind}>" * len(media)
        row[MEDIA[kind]] = [str(Path(x).absolute()) if isinstance(x, str | os.PathLike) else x for x in media]
    return {"messages": [{"role": "user", "content": marks + text}], **row}
