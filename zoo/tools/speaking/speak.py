"""Answers that a checkpoint says: codes of its talker, their audio, and rows that have them as targets; `zoo.speak`.

Thinker, talker and code predictor are zoo's own, so a run's checkpoint speaks as it is; transformers' module makes the audio. Greedy
codes are those of transformers' `generate(return_audio=True)`, and drawn ones too where rows are alone in a batch.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from zoo.config.entries import parse_entry
from zoo.config.layers.layer import Overrides
from zoo.config.schema import Recipe
from zoo.data.errors import RowError
from zoo.data.loading.batches import make_batch
from zoo.data.sample import IGNORE, Sample
from zoo.data.sources.row_set import open_rows
from zoo.data.sources.rows import Row
from zoo.errors import UserError
from zoo.files import expanded
from zoo.generation.generator import Generator, load_generator
from zoo.generation.prompts import Prompt, with_stand_ins
from zoo.generation.sampling import Sampling
from zoo.generation.speaking import Voice, say
from zoo.launch.launcher import run_task
from zoo.launch.prepare import world_size
from zoo.logging.result import Model
from zoo.parallel.process_state import preserve_process_state
from zoo.registry import get_family
from zoo.tools.asking import AskedRows, asked, check_counts
from zoo.tools.out_file import KeptRows, out_file
from zoo.tools.speaking.vocoder import Vocoder
from zoo.tools.speaking.written import as_item
from zoo.types import JsonMapping, JsonObject

ROWS = "rows.jsonl"
UNSPOKEN = "unspoken"  # key of a result that is no target: why
OUTSIDE = ("source", "audio", "frames", UNSPOKEN)  # keys of results that rows of data.train do not have


@preserve_process_state()
def speak(
    path: Model,
    rows: AskedRows = None,
    overrides: Overrides = (),
    *,
    out: str | Path,
    speaker: str | None = None,
    answers: Literal["model", "rows"] = "model",
    audio: bool = True,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch: int = 16,
    max_rows: int | None = None,
    in_process: bool = False,
    **voice: Any,
) -> list[JsonObject]:
    """Say the answers to rows, in separate processes.

    Args:
        path: a checkpoint with a talker, as `zoo.generate` takes it.
        rows: as `zoo.generate` takes them.
        overrides: of the recipe.
        out: a folder for `rows.jsonl`, rows with `speech` that data.train takes, `speech/N.npy` (frames, codebooks) int32 and `audio/N.wav`.
        speaker: who speaks; None: whom each row names.
        answers: "model": those that it gives; "rows": the rows' own, which are spoken as they are.
        audio: write wav files, by the checkpoint's own vocoder.
        max_new_tokens: most tokens of an answer.
        temperature: of its tokens, 0 is greedy.
        top_p: of its tokens, as `zoo.generate` has it.
        seed: of all draws.
        batch: most rows that are answered and spoken at once.
        max_rows: say the first so many rows only.
        in_process: a single rank runs in this process, as in the command `zoo speak`.
        voice: how codes are chosen: fields of `zoo.generation.speaking.Voice`; those left out are transformers' defaults of the family.

    Returns:
        Dicts of the rows, in order: `source`; the row as it was written, with `speech`, `audio` and `frames`; `unspoken` where it is not among
        `rows.jsonl`, as answer or speech was cut, or there is none, says why.

    Raises:
        UserError: no such checkpoint, a checkpoint without talker or vocoder, an unknown speaker, and whatever `zoo.generate` raises.
    """
    if answers not in ("model", "rows"):
        raise UserError(f"answers={answers}: wanted model (what it answers) or rows (their own answers)")
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    check_counts(batch=batch, max_rows=max_rows)
    try:
        Voice(**voice, seed=seed)
    except TypeError:
        raise UserError(f"{', '.join(voice)}: wanted {', '.join(Voice.__dataclass_fields__)}") from None
    folder = expanded(out)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"out={out}: it is a file; wanted a folder")
    asked_rows, unanswered = with_stand_ins(rows)
    with out_file(folder / ROWS) as file, asked(path, asked_rows, overrides) as recipe:
        recipe = _with_talker(recipe, path)
        defaults = get_family(recipe.model.family).load("config").voice_defaults
        options: JsonObject = {
            "sampling": asdict(sampling),
            "batch": batch,
            "voice": asdict(Voice(**{**defaults, **voice}, seed=seed)),
            "answers": answers,
            "unanswered": unanswered,
        }
        options |= {"max_rows": max_rows, "kept": file.kept and str(file.kept), "audio": audio}
        options |= {"speaker": speaker, "out": str(folder.resolve())}
        results: list[JsonObject] = run_task(
            "zoo.tools.speaking.speak:speak_here", recipe, world_size(recipe), options, fresh=not in_process
        )
        file.write(_targets(dict(enumerate(results))).values())
        for row in results if file.is_main else ():
            if (reason := row.get(UNSPOKEN)) is not None:
                print(f"zoo: {row['source']} is not among the rows of {folder / ROWS}: {reason}", file=sys.stderr)
        return results


def _with_talker(recipe: Recipe, path: Model) -> Recipe:
    """The recipe whose model has its talker; UserError for a family without one, or ranks that share a model."""
    for name in ("tp", "pp", "cp", "ep", "etp"):
        if (size := getattr(recipe.parallel, name)) > 1:
            raise UserError(
                f"parallel.{name}={size}: ranks that speak share out rows alone; leave it out, and give nproc"
            )
    family = get_family(recipe.model.family)
    if "talker" not in family.parts:
        raise UserError(f"{path}: {family.title} has no talker, so it writes text alone; zoo generate asks it")
    frozen = [part for part in family.parts if part != "talker"]
    return recipe.replace({"train.speech_loss": 1.0, "model.freeze": frozen})


def speak_here(recipe: Recipe, options: JsonMapping) -> list[JsonObject]:
    """`speak` on this rank, for the rows of data.eval; returns all results on every rank."""
    with load_generator(recipe, Sampling(**options["sampling"]), options["batch"]) as generator:
        assembly, out = generator.decoding.assembly, Path(options["out"])
        processor: Any = assembly.processor
        processor.speaks = False  # prompts have no speech
        for name in ("speech", *(["audio"] if options["audio"] else [])):
            (out / name).mkdir(parents=True, exist_ok=True)
        vocoder = Vocoder.load(assembly, generator.decoding.world.device) if options["audio"] else None
        speaking = Speaking(
            generator.decoding, generator.batch, generator.bad_rows, Voice(**options["voice"]), out, options["speaker"],
            options["answers"] == "rows", vocoder,
        )  # fmt: skip
        entries = [parse_entry(spec, "data.eval") for spec in recipe.data.eval]
        bad, world = generator.bad_rows, generator.decoding.world
        rows = open_rows(
            entries, recipe.data, assembly.processor.modalities, bad.handle, max_rows=options["max_rows"], evaluation=True
        )  # fmt: skip
        kept = KeptRows(options.get("kept"), world)
        keep, unanswered = (lambda new: kept.add(_targets(new))), frozenset(options["unanswered"])
        results = speaking.all(rows, range(len(rows)), unanswered, keep)
        if bad.counts and world.is_main:
            print(f"rows left out: {bad.summary()}", file=sys.stderr)
        return list(results.values())


def _targets(results: Mapping[int, JsonObject]) -> dict[int, JsonObject]:
    """Rows to train on, of those that were spoken to the end."""
    return {
        number: {key: value for key, value in row.items() if key not in OUTSIDE}
        for number, row in results.items()
        if UNSPOKEN not in row
    }


@dataclass(frozen=True)
class Speaking(Generator):
    """Answers rows, and says what it answered."""

    voice: Voice
    out: Path
    speaker: str | None
    own_answers: bool  # say the rows' own
    vocoder: Vocoder | None

    def prompt(self, row: Row, answered: bool = True) -> Prompt:
        """The prompt of a row; RowError as every generator's, as `as_item`, for what the talker can't say or a speaker that is not there."""
        prompt = super().prompt(row, answered)
        as_item(row, "")
        try:
            self.speech.check(row)
        except ValueError as error:
            raise RowError(row.source, "speech", f"the row can't be spoken: {error}.") from error
        try:
            self.speech.speaker(self.speaker or row.speaker)
        except ValueError as error:
            raise RowError(row.source, "speech", f"the row can't be spoken: {error}; give speaker=NAME.") from error
        if self.own_answers and prompt.reference is None:
            raise RowError(
                row.source, "speech", "the row has no answer of its own to be spoken; leave out answers=rows."
            )
        return prompt

    @property
    def speech(self) -> Any:
        """What the talker reads and says, of the family's processor."""
        processor: Any = self.decoding.assembly.processor
        return processor.speech

    def answered(self, prompts: Mapping[int, Prompt]) -> Mapping[int, JsonObject]:
        """Rows with their speech, whose files are written; or why there is none."""
        decoding, speech = self.decoding, self.speech
        if self.own_answers:
            tokens = [_up_to_end(prompt.answer, decoding.ends) for prompt in prompts.values()]
        else:
            tokens = decoding.answer([prompt.sample for prompt in prompts.values()], list(prompts))
        results, samples = dict[int, JsonObject](), dict[int, Sample]()
        for (number, prompt), answer in zip(prompts.items(), tokens, strict=True):
            result = self.result(prompt, answer)
            results[number] = {"source": prompt.row.source}
            try:
                samples[number] = speech.to_say(self._grown(prompt, answer), self.speaker or prompt.row.speaker)
            except ValueError as error:
                results[number][UNSPOKEN] = str(error)
                continue
            results[number] |= as_item(prompt.row, result["text"]) | {"speaker": self.speaker or prompt.row.speaker}
            if result["finish"] == "length":
                results[number][UNSPOKEN] = f"its answer is cut after {len(answer)} tokens (max_new_tokens)"
        if samples:
            batch = make_batch(list(samples.values()), "thd", decoding.align, None, decoding.assembly.processor.pad_id)
            model = getattr(decoding.chunks[0], "module", decoding.chunks[0])  # bf16 wraps it
            said = say(model, decoding.step, batch, list(samples), self.voice)
            for number, (codes, ended) in zip(samples, said, strict=True):
                results[number] |= self._written(number, codes, self.speaker or prompts[number].row.speaker)
                if not ended:
                    results[number][UNSPOKEN] = f"its speech is cut after {len(codes)} frames (talker_max_new_tokens)"
        return results

    def _grown(self, prompt: Prompt, answer: Sequence[int]) -> Sample:
        """The prompt's sample with an answer but for its last token, which nobody reads, as in transformers; ValueError for a placeholder."""
        new = torch.tensor(answer[:-1], dtype=torch.int64)
        if set(answer[:-1]) & set(self.decoding.assembly.processor.media_ids):
            raise ValueError("its answer has a placeholder of a medium")
        ids = torch.cat((prompt.sample.input_ids, new))
        return replace(prompt.sample, input_ids=ids, labels=torch.full_like(ids, IGNORE))

    def _written(self, number: int, codes: Tensor, speaker: str) -> JsonObject:
        """Write a speech."""
        if not len(codes):
            return {UNSPOKEN: "its talker ended at once"}
        if (silent := self.speech.silent(codes)) is not None:
            return {UNSPOKEN: f"its talker says what is no sound: {silent}"}
        names: JsonObject = {"speech": f"speech/{number:06d}.npy", "frames": len(codes)}
        np.save(self.out / names["speech"], codes.numpy().astype(np.int32))
        if self.vocoder is not None:
            names["audio"] = f"audio/{number:06d}.wav"
            voice = self.speech.voice(speaker)
            self.vocoder.write(codes, voice, self.voice.seed_of(number), self.out / names["audio"])
        return names


def _up_to_end(answer: Sequence[int], ends: Collection[int]) -> list[int]:
    """An answer's tokens, the one that ends it the last."""
    first = next((index for index, token in enumerate(answer) if token in ends), len(answer) - 1)
    return list(answer[: first + 1])
