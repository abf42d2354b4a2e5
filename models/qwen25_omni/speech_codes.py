"""What Qwen2.5-Omni's talker says, as its checkpoint has it: codes, speakers, and where the answer stands."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zoo.data.media.codes import SpeechCodes
from zoo.data.sample import Sample
from zoo.errors import ConfigError
from zoo.models.qwen25_omni.config import Qwen25TalkerConfig
from zoo.models.qwen25_omni.speech import SpeechTokens, spoken_row
from zoo.packing.spoken import ANSWERS, SpokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPEAKERS = "spk_dict.pt"  # beside published weights, by name: the speaker's first text token, and what token2wav wants


@dataclass(frozen=True)
class Qwen25SpeechCodes(SpeechCodes):
    """Codes are those that token2wav embeds. `speakers` is empty of random weights, where every name has one token."""

    hertz = Qwen25TalkerConfig.hertz

    tokens: SpeechTokens
    turn: tuple[int, int, int]  # tokens of <|im_start|>, assistant and <|im_end|>
    voices: Mapping[str, Mapping[str, Tensor]]  # what token2wav wants of each speaker, by names in lower case

    @classmethod
    def build(cls, whole: Any, tokenizer: PreTrainedTokenizerBase, source: str | None) -> Qwen25SpeechCodes:
        """Read a `transformers.Qwen2_5OmniConfig` that speaks, and its speakers from the folder of its weights; ConfigError for a bad file of them."""
        tokens = SpeechTokens.from_config(whole)
        limit = min(whole.token2wav_config.dit_config.num_embeds, whole.talker_config.vocab_size, *tokens.codes)
        turn = [
            tokenizer.encode(text, add_special_tokens=False)[0] for text in ("<|im_start|>", "assistant", "<|im_end|>")
        ]
        read = {} if source is None else _speakers(Path(source), whole.thinker_config.text_config.vocab_size)
        speakers = {name: token for name, (token, _) in read.items()}
        voices = {name: voice for name, (_, voice) in read.items()}
        return cls((limit,), speakers, tokens, (turn[0], turn[1], turn[2]), voices)

    def voice(self, name: str) -> Mapping[str, Tensor]:
        """What token2wav is conditioned on, in fp32: conditioning (1, C) and reference_mel (1, M, mel)."""
        return self.voices[self.known(name)]

    def row(self, ids: Tensor, frames: Tensor, speaker: int) -> SpokenRow:
        """As every talker's."""
        return spoken_row(ids, frames, self.answer(ids), speaker, self.tokens)

    def spoken(self, sample: Sample, speaker: int, frames: Tensor) -> tuple[Sample, SpokenRow]:
        """As every talker's, with the places of the answer."""
        spoken, said = super().spoken(sample, speaker, frames)
        answer = torch.tensor([self.answer(sample.input_ids)])
        return replace(spoken, media={**spoken.media, ANSWERS: answer}), said

    def speaker(self, name: str) -> int:
        """The first text token of a speaker; of random weights everyone's."""
        return super().speaker(name) if self.speakers else self.tokens.text_bos

    def answer(self, ids: Tensor) -> tuple[int, int]:
        """Places of the last answer's first token, and behind its last one; ValueError where there is none, or media follow."""
        start, assistant, end = self.turn
        answers = ((ids[:-1] == start) & (ids[1:] == assistant)).nonzero()[:, 0]
        if not len(answers):
            raise ValueError("no turn of the assistant is in the tokens")
        first = int(answers[-1]) + 3  # behind <|im_start|>assistant\n
        ends = (ids[first:] == end).nonzero()[:, 0]
        stop = first + int(ends[0]) if len(ends) else len(ids)
        if stop <= first:
            raise ValueError("the answer that is spoken has no text")
        if bool(torch.isin(ids[first:], torch.tensor(self.tokens.media)).any()):
            raise ValueError("media stand behind the question, where the talker does not read them")
        return first, stop


def _speakers(folder: Path, vocabulary: int) -> dict[str, tuple[int, Mapping[str, Tensor]]]:
    """The first text token of each speaker, and what `Qwen25SpeechCodes.voice` gives, by names in lower case."""
    path = folder / SPEAKERS
    if not path.is_file():
        raise ConfigError(f"{path} is not there: it names the speakers; copy the published file.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        speakers = {
            str(name).lower(): (
                int(speaker["bos_token"]),
                {"conditioning": speaker["cond"].float(), "reference_mel": speaker["ref_mel"].float()},
            )
            for name, speaker in content.items()
        }
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{path}: it can't be read as speakers ({type(error).__name__}: {reason}); copy the published {SPEAKERS} there."
        ) from error
    if wrong := {name: token for name, (token, _) in speakers.items() if not 0 <= token < vocabulary}:
        raise ConfigError(
            f"{path}: bos_token of speakers is {wrong}; wanted tokens of the thinker, 0 to {vocabulary - 1}."
        )
    return speakers
