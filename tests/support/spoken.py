"""Rows that transformers' omni models answer and say themselves, with what their talkers read and predicted, and its gradients; zoo beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from support import tiny
from support.engine import Zoo, packed_batch
from support.rows import Example, make_examples

SPEAKERS = ("Ethan", "Chelsie")


@dataclass
class Heard:
    """What a generation of transformers gives."""

    prompt: dict[str, Any]  # arguments of the thinker
    # (L,) of prompt and answer, the last token read by nobody
    answer: Tensor = field(default_factory=lambda: torch.empty(0))
    sound: Tensor = field(default_factory=lambda: torch.empty(0))
    frames: list[Tensor] = field(default_factory=list)  # (codebooks,) of each frame before the end
    logits: list[Tensor] = field(default_factory=list)  # (vocabulary,) behind each call of the talker
    residual: list[Tensor] = field(default_factory=list)  # (vocabulary,) of each residual code, frame by frame
    calls: list[dict[str, Any]] = field(default_factory=list)  # the talker's arguments


@dataclass(frozen=True)
class Spoken:
    """A row as transformers answered and said it."""

    sample: Any  # zoo's, with the speech among its media
    ids: Tensor  # (L,) of prompt and answer, without the end of turn
    frames: Tensor  # (F, codebooks)
    speaker: str
    heard: Heard

    def arguments(self, ids: Tensor) -> dict[str, Any]:
        """Those of transformers' thinker for a row of these ids (L,)."""
        return {
            **self.heard.prompt,
            "input_ids": ids[None],
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        }


@dataclass(frozen=True)
class Pair(ABC):
    """A tiny checkpoint in transformers and in zoo."""

    folder: Path
    hf: Any
    zoo: Zoo
    examples: Mapping[str, Example]  # rows that are not spoken yet

    family: ClassVar[str]
    names: ClassVar[tuple[str, ...]]  # of the examples that are said
    codebooks: ClassVar[int]

    @staticmethod
    @abstractmethod
    def write(folder: Path, **config: Any) -> Path:
        """Write the checkpoint."""

    @classmethod
    def load(cls, folder: Path, world: Any, **config: Any) -> Self:
        """Write the checkpoint, and load it; zoo trains the talker alone."""
        cls.write(folder, **config)
        hf, zoo = tiny.load_plain(folder), cls.trained(folder, world)
        return cls(folder, hf, zoo, make_examples(tiny.processor(cls.family, hf.config)))

    @classmethod
    def trained(cls, folder: Path, world: Any, *overrides: str, joint: bool = False) -> Zoo:
        """zoo's model of the checkpoint, with its talker alone to be trained, or `joint` with the thinker."""
        alone = [] if joint else ["train.speech_loss=1", "model.freeze=[vision,audio,language]"]
        return Zoo.load(folder, world, f"model.family={cls.family}", *alone, *overrides)

    @property
    @abstractmethod
    def end(self) -> int:
        """The code behind the last frame."""

    @abstractmethod
    def generate(self, prompt: dict[str, Any], speaker: str, heard: Heard, **options: Any) -> None:
        """Have transformers answer and say a prompt, and note what it gives."""

    @abstractmethod
    def teacher_forced(self, row: Spoken, *, joint: bool = False, hf: Any = None) -> tuple[Tensor, Tensor]:
        """transformers' logits of first codes and ends (F + 1, vocabulary) and of residual codes (codebooks - 1, F, vocabulary), given the row.

        Gradients go through the talker, `joint` through the thinker, too. `hf`: another model than the pair's.
        """

    def published(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors in memory in transformers under the names of its files."""
        return dict(tensors)

    def listen(self, name: str, number: int, words: int, **options: Any) -> Heard:
        """The example's prompt as transformers answers it greedily in `words` tokens and says it; `options`: of its `generate`."""
        example, turn = self.examples[name], self.speech.turn
        ids = example.sample.input_ids
        prompt = {**example.features, "input_ids": ids[None, : turn.answer(ids)[0]]}
        prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
        heard, vocabulary = Heard(prompt), self.hf.config.thinker_config.text_config.vocab_size
        self.generate(
            prompt, SPEAKERS[number % 2], heard, thinker_do_sample=False, thinker_max_new_tokens=words + 1,
            thinker_suppress_tokens=[*range(turn.start, vocabulary), turn.end], **options,
        )  # fmt: skip
        return heard

    def say(self, name: str, number: int, words: int, codes: int = 9) -> Spoken:
        """The example as it is answered in `words` tokens and said in `codes` - 1 frames, both greedily."""
        from zoo.data.sample import Sample

        heard = self.listen(
            name, number, words, talker_do_sample=False, talker_max_new_tokens=codes, talker_min_new_tokens=codes,
            talker_repetition_penalty=1.0,
        )  # fmt: skip
        frames, speaker = torch.stack(heard.frames)[: codes - 1], SPEAKERS[number % 2]
        whole = torch.cat((heard.answer[:-1], torch.tensor([self.speech.turn.end, 10])))
        labels, start = torch.full_like(whole, -100), heard.prompt["input_ids"].shape[1]
        labels[start:] = whole[start:]
        sample = Sample(whole, labels, self.examples[name].sample.media)
        spoken, _ = self.speech.spoken(sample, self.speech.speaker(speaker), frames)
        return Spoken(spoken, whole[:-2], frames, speaker, heard)

    @property
    def speech(self) -> Any:
        """What the talker reads and says, as zoo's processor has it."""
        return self.zoo.assembly.processor.speech

    @cached_property
    def rows(self) -> dict[str, Spoken]:
        """Every row, its answer longer than the one before."""
        return {name: self.say(name, number, words=1 + 2 * number) for number, name in enumerate(self.names)}

    @property
    def samples(self) -> list[Any]:
        """zoo's of all rows."""
        return [row.sample for row in self.rows.values()]

    @property
    def count(self) -> int:
        """First codes and ends of all rows."""
        return sum(len(row.frames) + 1 for row in self.rows.values())

    def logits(self, samples: list[Any], **packing: Any) -> list[list[Tensor]]:
        """zoo's logits as `teacher_forced` has them, of each sample of a packed row; of one codebook the first alone."""
        step, model = self.zoo.step(**packing), self.zoo.model
        inputs, _ = step.prepare(packed_batch(samples), evaluate=True)
        speech, noted = inputs.speech, model.noted_states()
        with torch.no_grad():
            first, residual = model.talker.logits(*model.read(inputs, speech, noted), speech, speech.label_rows)
        counts = [len(sample.media["speech_codes"]) for sample in samples]
        split = [first.split([count + 1 for count in counts])]
        split += [] if residual is None else [residual.split(counts, dim=1)]
        return [list(of_row) for of_row in zip(*split, strict=True)]

    def losses(self, rows: Sequence[Spoken], *, joint: bool = False, hf: Any = None) -> tuple[Tensor, Tensor]:
        """Sums of transformers' losses of rows: of first codes and ends, and of residual codes."""
        first_sum = residual_sum = torch.zeros(())
        for row in rows:
            first, residual = self.teacher_forced(row, joint=joint, hf=hf)
            wanted = torch.cat((row.frames[:, 0], torch.tensor([self.end])))
            first_sum = first_sum + F.cross_entropy(first, wanted, reduction="sum")
            residual_sum = residual_sum + F.cross_entropy(
                residual.flatten(0, 1), row.frames.T[1:].flatten(), reduction="sum"
            )
        return first_sum, residual_sum

    def loss(self, share: float = 0.3, *, joint: bool = False, hf: Any = None) -> Tensor:
        """What zoo trains, of all rows: first codes and ends, and `share` times the mean of each frame's residual codes; a mean over `count`."""
        first, residual = self.losses(list(self.rows.values()), joint=joint, hf=hf)
        return (first + share * residual / max(1, self.codebooks - 1)) / self.count

    def text_loss(self, hf: Any = None) -> Tensor:
        """The mean loss of each row's text, times its first codes and ends; a mean over `count`."""
        total = torch.zeros(())
        for row in self.rows.values():
            logits = (hf or self.hf).thinker(**row.arguments(row.sample.input_ids)).logits[0]
            total = total + F.cross_entropy(logits[:-1], row.sample.labels[1:]) * (len(row.frames) + 1)
        return total / self.count

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """transformers' of the loss, by the names of its files; of no parameter that it does not reach."""
        self.hf.zero_grad(set_to_none=True)
        loss.backward()
        return self.published({name: p.grad for name, p in self.hf.named_parameters() if p.grad is not None})
