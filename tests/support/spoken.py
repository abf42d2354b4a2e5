"""Rows that transformers' Qwen3-Omni says itself, with everything that its talker read and predicted, and its gradients when they are given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from support.rows import Example

SPEAKERS = ("Ethan", "Chelsie")


@dataclass
class Heard:
    """What a generation of transformers' talker reads and gives, call by call."""

    inputs: list[Tensor] = field(default_factory=list)  # (n, hidden) of each call
    logits: list[Tensor] = field(default_factory=list)  # (vocabulary,) behind each
    residual: list[Tensor] = field(default_factory=list)  # (vocabulary,) of each residual code, frame by frame
    frames: list[Tensor] = field(default_factory=list)  # (codebooks,)


@dataclass(frozen=True)
class Spoken:
    """A row as transformers answered and said it."""

    name: str
    sample: Any  # zoo's, with the speech among its media
    prompt: dict[str, Any]  # arguments of transformers' model
    ids: Tensor  # (L,) of prompt and answer, without the end of turn
    frames: Tensor  # (F, codebooks)
    speaker: str
    heard: Heard


@contextmanager
def listening(hf: Any) -> Iterator[Heard]:
    """Note the calls of the talker and of the code predictor inside the block."""
    heard, talker = Heard(), hf.talker
    of_talker, of_predictor = talker.forward, talker.code_predictor.forward

    @wraps(of_talker)  # generate reads its signature
    def talk(*args: Any, **kwargs: Any) -> Any:
        out = of_talker(*args, **kwargs)
        heard.inputs.append(kwargs["inputs_embeds"][0])
        heard.logits.append(out.logits[0, -1])
        if kwargs.get("residual_codes") is not None:
            heard.frames.append(kwargs["residual_codes"][0])
        return out

    @wraps(of_predictor)
    def predict(*args: Any, **kwargs: Any) -> Any:
        out = of_predictor(*args, **kwargs)
        heard.residual.append(out.logits[0, -1])
        return out

    talker.forward, talker.code_predictor.forward = talk, predict
    try:
        yield heard
    finally:
        talker.forward, talker.code_predictor.forward = of_talker, of_predictor


def say(hf: Any, zoo: Any, example: Example, number: int, words: int = 6, codes: int = 9) -> Spoken:
    """The row's prompt as transformers answers it in `words` tokens and says it in `codes` - 1 frames, both greedily."""
    tokens = zoo.step().speech_tokens
    ids = example.sample.input_ids
    starts = ((ids[:-1] == tokens.start) & (ids[1:] == tokens.assistant)).nonzero()[:, 0]
    prompt = {**example.features, "input_ids": ids[None, : int(starts[-1]) + 3]}
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    specials = [*range(tokens.start, hf.config.thinker_config.text_config.vocab_size), tokens.end]
    speaker = SPEAKERS[number % 2]
    with listening(hf) as heard:
        hf.generate(
            **prompt, speaker=speaker, return_audio=True, thinker_do_sample=False, thinker_max_new_tokens=words + 1,
            thinker_suppress_tokens=specials, talker_do_sample=False, talker_max_new_tokens=codes, talker_min_new_tokens=codes,
        )  # fmt: skip
    with torch.no_grad():
        answer = hf.thinker.generate(
            **prompt, do_sample=False, max_new_tokens=words + 1, suppress_tokens=specials, eos_token_id=tokens.end
        )
    said = answer[0, :-1]  # the last token is read by nobody
    return spoken_by(zoo, example, prompt, said, torch.stack(heard.frames), speaker, heard)


def spoken_by(
    zoo: Any, example: Example, prompt: dict[str, Any], ids: Tensor, frames: Tensor, speaker: str, heard: Heard
) -> Spoken:
    """The same as zoo's sample."""
    from zoo.data.sample import Sample
    from zoo.packing.spoken import COUNTS, FRAMES, WEIGHTS
    from zoo.packing.spoken import SPEAKERS as CODES

    config = zoo.assembly.config.hf
    speech = {
        FRAMES: frames,
        COUNTS: torch.tensor([len(frames)]),
        CODES: torch.tensor([config.talker_config.speaker_id[speaker.lower()]]),
        WEIGHTS: torch.ones(1),
    }
    whole = torch.cat((ids, torch.tensor([config.im_end_token_id, 10])))
    labels = torch.full_like(whole, -100)
    labels[prompt["input_ids"].shape[1] :] = whole[prompt["input_ids"].shape[1] :]
    sample = Sample(whole, labels, {**example.sample.media, **speech}, codes=len(frames) + 1)
    return Spoken(example.name, sample, prompt, ids, frames, speaker, heard)


def teacher_forced(hf: Any, spoken: Spoken, *, joint: bool = False) -> tuple[Tensor, Tensor]:
    """transformers' logits of first codes and ends (F + 1, vocabulary) and of residual codes (codebooks - 1, F, vocabulary), given the row.

    Inputs are made by the functions that its `generate` calls, with gradients, `joint` through the thinker, too.
    """
    config, talker, frames = hf.config, hf.talker, spoken.frames
    with torch.set_grad_enabled(joint and torch.is_grad_enabled()):
        states = hf.thinker(**arguments(spoken, spoken.ids), output_hidden_states=True).hidden_states
        specials = hf.thinker.get_input_embeddings()(
            torch.tensor([[config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id]])
        )
    embedded, hidden = states[0], states[config.talker_config.accept_hidden_layer]
    prompt = spoken.prompt["input_ids"]
    length, ids = prompt.shape[1], spoken.ids[None]
    places = torch.where(prompt == config.im_start_token_id, torch.arange(length), -1).cummax(-1).values
    of_user = (prompt.gather(1, (places + 1).clamp(max=length - 1)) == config.user_token_id)[0]
    thinker = config.thinker_config
    media = torch.isin(ids, torch.tensor([thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]))
    user = hf._get_talker_user_parts(0, length, media, hidden, embedded)[:, of_user]
    bos, eos, pad = talker.text_projection(specials).chunk(3, dim=1)
    speaker = config.talker_config.speaker_id[spoken.speaker.lower()]
    opening, opening_ids, trailing = hf._get_talker_assistant_parts(
        length - 3, len(spoken.ids) + 1, speaker, embedded, pad, bos, eos
    )
    first = talker.get_input_embeddings()(frames[:, 0])
    tables = talker.code_predictor.get_input_embeddings()
    rest = [table(codes) for table, codes in zip(tables, frames.T[1:], strict=True)]
    texts = [trailing[:, i] if i < trailing.shape[1] else pad[:, 0] for i in range(len(frames))]
    heard = torch.stack([first, *rest]).sum(0)[None] + torch.stack(texts, dim=1)
    inputs = torch.cat((user, opening, heard), dim=1)
    talker_ids = torch.cat((prompt[:, of_user], opening_ids, opening_ids[:, :1].expand(1, len(frames))), dim=1)
    grids = {
        name: spoken.prompt[name]
        for name in ("image_grid_thw", "video_grid_thw", "video_second_per_grid")
        if name in spoken.prompt
    }
    out = talker(
        inputs_embeds=inputs, talker_input_ids=talker_ids, attention_mask=torch.ones_like(talker_ids),
        output_hidden_states=True, **grids,
    )  # fmt: skip
    last = out.hidden_states[0][-1][0, -len(frames) - 1 : -1]
    sequences = torch.stack([last, first, *rest[:-1]], dim=1)
    predictor = talker.code_predictor
    hidden = predictor.model(inputs_embeds=sequences).last_hidden_state
    residual = torch.stack([head(hidden[:, 1 + i]) for i, head in enumerate(predictor.lm_head)])
    return out.logits[0, -len(frames) - 1 :], residual


def arguments(spoken: Spoken, ids: Tensor) -> dict[str, Any]:
    """Those of transformers' thinker for a row of these ids (L,)."""
    return {**spoken.prompt, "input_ids": ids[None], "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}


def text_loss(hf: Any, rows: Sequence[Spoken]) -> Tensor:
    """The mean loss of each row's text, times its first codes and ends; their sum."""
    total = torch.zeros(())
    for row in rows:
        logits = hf.thinker(**arguments(row, row.sample.input_ids)).logits[0]
        total = total + F.cross_entropy(logits[:-1], row.sample.labels[1:]) * (len(row.frames) + 1)
    return total


def losses(hf: Any, rows: Sequence[Spoken], *, joint: bool = False) -> tuple[Tensor, Tensor]:
    """Sums of the losses of all rows: of first codes and ends, and of residual codes."""
    first_sum = residual_sum = torch.zeros(())
    end = torch.tensor([hf.config.talker_config.codec_eos_token_id])
    for row in rows:
        first, residual = teacher_forced(hf, row, joint=joint)
        first_sum = first_sum + F.cross_entropy(first, torch.cat((row.frames[:, 0], end)), reduction="sum")
        residual_sum = residual_sum + F.cross_entropy(
            residual.flatten(0, 1), row.frames.T[1:].flatten(), reduction="sum"
        )
    return first_sum, residual_sum
