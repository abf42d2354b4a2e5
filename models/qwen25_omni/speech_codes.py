"""What Qwen2.5-Omni's talker says, as its checkpoint has it: codes, speakers, and where the answer stands."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zoo.data.media.codes import SpeechCodes
from zoo.errors import ConfigError
from zoo.models.qwen25_omni.config import Qwen25TalkerConfig
from zoo.models.qwen25_omni.speech import Qwen25SpeechTokens
from zoo.packing.spoken import TurnTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPEAKERS = "spk_dict.pt"  # beside published weights, by name: the speaker's first text token, and what token2wav wants


@dataclass(frozen=True)
class Qwen25SpeechCodes(SpeechCodes):
    """Codes are those that token2wav embeds. `speakers` is empty of random weights, where every name has one token."""

    hertz = Qwen25TalkerConfig.hertz

    tokens: Qwen25SpeechTokens
    voices: Mapping[str, Mapping[str, Tensor]]  # what token2wav wants of each speaker, by names in lower case

    @classmethod
    def build(cls, whole: Any, tokenizer: PreTrainedTokenizerBase, source: str | None) -> Qwen25SpeechCodes:
        """Read a `transformers.Qwen2_5OmniConfig` that speaks, and its speakers from the folder of its weights; ConfigError for a bad file of them."""
        tokens = Qwen25SpeechTokens.from_config(whole)
        limit = min(whole.token2wav_config.dit_config.num_embeds, whole.talker_config.vocab_size, *tokens.codes)
        turn = [
            tokenizer.encode(text, add_special_tokens=False)[0] for text in ("<|im_start|>", "assistant", "<|im_end|>")
        ]
        read = {} if source is None else _speakers(Path(source), whole.thinker_config.text_config.vocab_size)
        speakers = {name: token for name, (token, _) in read.items()}
        voices = {name: voice for name, (_, voice) in read.items()}
        return cls((limit,), speakers, tokens, TurnTokens(*turn), voices)

    def voice(self, name: str) -> Mapping[str, Tensor]:
        """What token2wav is conditioned on, in fp32: conditioning (1, C) and reference_mel (1, M, mel)."""
        return self.voices[self.known(name)]

    def speaker(self, name: str) -> int:
        """The first text token of a speaker; of random weights everyone's."""
        return super().speaker(name) if self.speakers else self.tokens.text_bos


def _speakers(folder: Path, vocabulary: int) -> dict[str, tuple[int, Mapping[str, Tensor]]]:
    """The first text token of each speaker, and what `Qwen25SpeechCodes.voice` gives, by names in lower case."""
    path = folder / SPEAKERS
    if not path.is_file():
        raise ConfigError(f"{path} is not there: it names the speakers; copy the published file.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        speakers: dict[str, tuple[int, Mapping[str, Tensor]]] = {
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
