"""Qwen2.5-Omni's talker reads, predicts and learns what transformers' does, which says the rows itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import tiny
from support.engine import Zoo, packed_batch
from support.pairs import relative_errors, worst
from support.rows import make_examples
from support.tiny_qwen25_talker import CODES, SPEAKERS, write_tiny_qwen25_talker
from support.weights import export, same, tensors

TALKS = ("model.family=qwen25_omni", "train.speech_loss=1", "model.freeze=[vision,audio,language]")
ROWS = (
    "text-short",
    "text-long",
    "image-short",
    "multi_image-long",
    "video-long",
    "audio-long",
    "audio_in_video-short",
    "turns",
)
OPTIONS: dict[str, Any] = {"video_fps": 2.0, "max_frames": 8}


@dataclass(frozen=True)
class Spoken:
    """A row as transformers answered and said it, and what its talker read and gave."""

    sample: Any  # zoo's, with the speech among its media
    prompt: dict[str, Any]  # arguments of transformers' thinker
    frames: torch.Tensor  # (F,)
    call: dict[str, Any]  # arguments of the talker's first call, and its thinker_reply_part
    logits: list[torch.Tensor]  # (vocabulary,) behind each call


def say(hf: Any, zoo: Any, example: Any, number: int, words: int, codes: int = 9) -> Spoken:
    """The row's prompt as transformers answers it in `words` tokens and says it in `codes` - 1 frames, both greedily."""
    from zoo.data.sample import Sample
    from zoo.packing.spoken import ANSWERS, COUNTS, FRAMES, WEIGHTS
    from zoo.packing.spoken import SPEAKERS as NAMED

    talker, reads, heard = hf.talker, zoo.assembly.processor.speech, []
    forward = talker.forward

    @wraps(forward)  # generate reads its signature
    def talk(*args: Any, **kwargs: Any) -> Any:
        given = {name: x.clone() if torch.is_tensor(x) else x for name, x in kwargs.items()}  # it writes into them
        out = forward(*args, **kwargs)
        heard.append((given, out.logits[0, -1]))
        return out

    first = reads.answer(example.sample.input_ids)[0]
    prompt = {**example.features, "input_ids": example.sample.input_ids[None, :first]}
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    asked = dict(prompt)
    # Without the prefix generate hands pixels to the talker as well, which refuses them.
    prompt = {f"thinker_{name}" if name.startswith("pixel") else name: x for name, x in prompt.items()}
    speaker = list(SPEAKERS)[number % 2]
    talker.forward = talk
    try:
        answer, _ = hf.generate(
            **prompt, speaker=speaker, thinker_do_sample=False,
            thinker_max_new_tokens=words + 1, thinker_suppress_tokens=[*range(reads.turn[0], 386)], talker_do_sample=False,
            talker_max_new_tokens=codes, talker_min_new_tokens=codes, talker_eos_token_id=[CODES, CODES + 2],
            talker_repetition_penalty=1.0, token2wav_num_steps=2,
        )  # fmt: skip
    finally:
        talker.forward = forward
    said, frames = answer[0, :-1], torch.cat([call["input_ids"][0] for call, _ in heard[1:]])
    whole = torch.cat((said, torch.tensor([reads.turn[2], 10])))  # the last token is read by nobody
    labels = torch.full_like(whole, -100)
    speech = {
        FRAMES: frames[:, None],
        COUNTS: torch.tensor([len(frames)]),
        NAMED: torch.tensor([SPEAKERS[speaker]]),
        ANSWERS: torch.tensor([[first, len(said)]]),
        WEIGHTS: torch.ones(1),
    }
    sample = Sample(whole, labels, {**example.sample.media, **speech})
    call = {**heard[0][0], "thinker_reply_part": heard[1][0]["thinker_reply_part"]}
    return Spoken(sample, asked, frames, call, [logits for _, logits in heard])


def read_again(hf: Any, row: Spoken) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompt and the reply that the talker reads, worked out anew with gradients of the thinker."""
    ((first, stop),) = row.sample.media["speech_answer"].tolist()
    ids = row.sample.input_ids[None, :stop]
    given = {**row.prompt, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    states = hf.thinker(**given, output_hidden_states=True).hidden_states
    thinker, talker, table = hf.config.thinker_config, hf.talker, hf.thinker.get_input_embeddings()
    media = torch.tensor([thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id])
    read = states[-1][0] + states[0][0].masked_fill(torch.isin(ids[0], media)[:, None], 0.0)
    bos = row.call["input_text_ids"][0, -2:-1]
    prompt = torch.cat((read[:first], table(bos), read[first : first + 1]))
    return prompt, torch.cat((read[first + 1 :], table(torch.tensor([talker.text_eos_token, talker.text_pad_token]))))


def teacher_forced(hf: Any, row: Spoken, *, joint: bool = False) -> torch.Tensor:
    """transformers' logits (F + 1, vocabulary) of codes and the end, with what its generation read, and gradients, `joint` of the thinker too."""
    talker, call = hf.talker, row.call
    config, table = talker.config, talker.get_input_embeddings()
    opening = table(torch.tensor([config.tts_codec_pad_token_id, config.tts_codec_start_token_id]))
    prompt, reply = read_again(hf, row) if joint else (call["inputs_embeds"][0], call["thinker_reply_part"][0])
    texts = reply[torch.arange(len(row.frames)).clamp(max=len(reply) - 1)]
    inputs = torch.cat((prompt[:-2], prompt[-2:] + opening, texts + table(row.frames)))
    grids = ("image_grid_thw", "video_grid_thw")
    positions, deltas = talker.get_rope_index(
        call["input_text_ids"], *(call.get(name) for name in grids), call["attention_mask"], call.get("use_audio_in_video", False),
        call.get("audio_feature_lengths"), call.get("video_second_per_grid"),
    )  # fmt: skip
    later = (len(prompt) + torch.arange(len(row.frames)) + deltas).expand(3, 1, -1)
    out = talker.model(
        inputs_embeds=talker.thinker_to_talker_proj(inputs)[None], position_ids=torch.cat((positions, later), dim=-1)
    )
    return talker.codec_head(out.last_hidden_state[0, -len(row.frames) - 1 :])


@dataclass(frozen=True)
class Pair:
    folder: Path
    hf: Any
    zoo: Zoo
    rows: dict[str, Spoken]

    @property
    def samples(self) -> list[Any]:
        return [row.sample for row in self.rows.values()]

    @property
    def end(self) -> int:
        return int(self.hf.config.talker_config.tts_codec_end_token_id)

    def logits(self, samples: list[Any], **packing: Any) -> list[torch.Tensor]:
        """zoo's logits of codes and ends of each sample of a packed row."""
        step, model = self.zoo.step(**packing), self.zoo.model
        inputs, _ = step.prepare(packed_batch(samples))
        speech = inputs.speech
        with torch.no_grad():
            first, residual = model.talker.logits(
                *model.read(inputs, speech, model.noted_states()), speech, speech.label_rows
            )
        assert residual is None
        return list(first.split([len(sample.media["speech_codes"]) + 1 for sample in samples]))

    def loss(self, row: Spoken, *, joint: bool = False) -> torch.Tensor:
        targets = torch.cat((row.frames, torch.tensor([self.end])))
        return F.cross_entropy(teacher_forced(self.hf, row, joint=joint), targets, reduction="sum")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any, cpu_world: Any) -> Iterator[Pair]:
    folder = write_tiny_qwen25_talker(tmp_path_factory.mktemp("talker"))
    hf, zoo = tiny.load_plain(folder), Zoo.load(folder, cpu_world, *TALKS)
    examples = make_examples(tiny.processor("qwen25_omni", hf.config))  # of rows that are not spoken yet
    rows = {name: say(hf, zoo, examples[name], number, words=1 + 2 * number) for number, name in enumerate(ROWS)}
    yield Pair(folder, hf, zoo, rows)


@pytest.mark.parametrize("name", ROWS)
def test_the_row_that_transformers_said(name: str, pair: Pair) -> None:
    """All that its generation predicted, code by code, is what zoo predicts of the whole row at once."""
    row = pair.rows[name]
    (logits,) = pair.logits([row.sample])
    assert len(row.logits) == 9 and worst([logits], [torch.stack(row.logits)]) < 1e-5
    with torch.no_grad():
        assert worst([teacher_forced(pair.hf, row)], [torch.stack(row.logits)]) < 1e-5


@pytest.mark.parametrize("packing", [{}, {"align": 4}], ids=str)
def test_packed_rows(packing: dict, pair: Pair) -> None:
    found = pair.logits(pair.samples, **packing)
    assert worst(found, [torch.stack(row.logits) for row in pair.rows.values()]) < 1e-5


@pytest.mark.parametrize("layout", ["one by one", "packed", "padded between rows", "backwards", "recomputed"])
def test_every_gradient(layout: str, pair: Pair) -> None:
    rows, zoo = list(pair.rows.values()), pair.zoo
    if layout == "recomputed":
        zoo = Zoo.load(pair.folder, zoo.world, *TALKS, "engine.recompute=full")
    count = sum(len(row.frames) + 1 for row in rows)
    wanted_loss = torch.stack([pair.loss(row) for row in rows]).sum() / count
    pair.hf.zero_grad(set_to_none=True)
    wanted_loss.backward()
    wanted = {name: p.grad for name, p in pair.hf.named_parameters() if p.grad is not None}
    assert wanted.keys() == {name for name, _ in pair.hf.named_parameters() if name.startswith("talker.")}
    samples = pair.samples[::-1] if layout == "backwards" else pair.samples
    batches = [packed_batch([sample]) for sample in samples] if layout == "one by one" else [packed_batch(samples)]
    loss, gradients = zoo.gradients(batches, count, **({"align": 4} if "padded" in layout else {}))
    assert loss == pytest.approx(float(wanted_loss), rel=1e-6)
    found = zoo.published({name: grad for name, grad in gradients.items() if name.startswith("talker.")})
    errors = relative_errors(found, wanted)
    assert not {name: error for name, error in errors.items() if not error < 1e-5}
    frozen = [p for name, p in zoo.model.named_parameters() if not name.startswith("talker.")]
    assert frozen and all(p.grad is None for p in frozen), "a thinker that is not trained"


def test_gradients_of_thinker_and_talker(pair: Pair) -> None:
    """Gradients of the codes' loss reach a thinker that is trained: by what it embeds, and by the states that are read."""
    rows, zoo = (
        list(pair.rows.values()),
        Zoo.load(pair.folder, pair.zoo.world, "model.family=qwen25_omni", "train.speech_loss=0.5"),
    )
    count = sum(len(row.frames) + 1 for row in rows)
    wanted_loss = 0.5 * torch.stack([pair.loss(row, joint=True) for row in rows]).sum() / count
    pair.hf.zero_grad(set_to_none=True)
    wanted_loss.backward()
    wanted = {name: p.grad for name, p in pair.hf.named_parameters() if p.grad is not None}
    loss, gradients = zoo.gradients([packed_batch(pair.samples)], count)
    assert loss == pytest.approx(float(wanted_loss), rel=1e-6)
    found = zoo.published({name: grad for name, grad in gradients.items() if grad is not None})
    apart = tiny.renamed(
        wanted,
        {
            "thinker.model.language_model.": "thinker.model.",
            "thinker.model.visual.": "thinker.visual.",
            "thinker.model.audio_tower.": "thinker.audio_tower.",
        },
    )
    assert {name.split(".")[1] for name in apart} >= {"model", "visual", "audio_tower"}
    errors = relative_errors({name: found[name] for name in apart}, apart)
    assert not {name: error for name, error in errors.items() if not error < 1e-5}


def test_metrics_of_each_row(pair: Pair) -> None:
    """Metrics of a step and of an evaluation: sums over codes, ends and rows."""
    step, rows = pair.zoo.step(), list(pair.rows.values())
    with torch.no_grad():
        output, loss = step(iter([packed_batch(pair.samples)]), pair.zoo.model, loss_scale=1.0, evaluate=True)
        _, metrics = loss(output)
        singles = [float(pair.loss(row)) for row in rows]
    for number, (row, single) in enumerate(zip(rows, singles, strict=True)):
        assert float(metrics["segment_nll"][number]) == pytest.approx(single, rel=1e-5)
        assert metrics["segment_weight"][number] == metrics["segment_labels"][number] == len(row.frames) + 1
        guesses = torch.stack(row.logits).argmax(-1)
        right = int((guesses[:-1] == row.frames).sum()) + int(guesses[-1] == pair.end)
        assert int(metrics["segment_correct"][number]) == right
    totals = {name: float(value) for name, value in metrics.items() if not value.ndim}
    means = step.speech.means(totals, float(metrics["weight"]))
    assert means == {"code_loss": pytest.approx(sum(singles) / (9 * len(rows)), rel=1e-5)}


def spoken_row(**keys: Any) -> Any:
    from zoo.data.sources.references import Access
    from zoo.data.sources.rows import make_row

    messages = [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "1 2"}]
    return make_row(
        {"messages": messages, "speech": list(range(9)), "speaker": "Chelsie", **keys}, "rows:1", Access(Path())
    )


def test_a_row_as_the_loader_has_it(pair: Pair) -> None:
    from zoo.packing.spoken import ANSWERS, COUNTS, FRAMES
    from zoo.packing.spoken import SPEAKERS as NAMED

    sample = pair.zoo.assembly.processor.encode(spoken_row(speaker="chelsie"), **OPTIONS)
    assert sample.num_labels == sample.label_weight == sample.codes == 10
    assert sample.media[FRAMES][:, 0].tolist() == list(range(9)) and sample.media[COUNTS].tolist() == [9]
    assert sample.media[NAMED].tolist() == [SPEAKERS["Chelsie"]]
    ((first, stop),) = sample.media[ANSWERS].tolist()
    assert pair.zoo.assembly.processor.tokenizer.decode(sample.input_ids[first:stop]) == "1 2"
    (logits,) = pair.logits([sample])
    assert logits.shape == (10, CODES + 6)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"speech": None, "speaker": None}, "can't be learnt: it has none; give it"),
        ({"speech": [[1, 2]] * 9}, "its frames have 2 codes; wanted 1"),
        ({"speech": [0, CODES, 1, 2]}, f"frame 1 has code {CODES} of codebook 0; wanted 0 to {CODES - 1}"),
        ({"speech": [1, 2]}, "it has 2 frames, fewer than the answer has tokens"),
        ({"speaker": "Nobody"}, "speaker Nobody is not in the checkpoint, which has chelsie, ethan"),
        ({"speaker": None}, "it has no speaker; the checkpoint has chelsie, ethan"),
    ],
    ids=str,
)
def test_a_speech_that_does_not_fit_the_talker_is_refused(keys: dict, reason: str, pair: Pair) -> None:
    from zoo.data.errors import RowError

    with pytest.raises(RowError, match=f"rows:1: .*{reason}"):
        pair.zoo.assembly.processor.encode(spoken_row(**keys), **OPTIONS)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not a pickle", "can't be read as speakers"),
        (None, "is not there: it names the speakers"),
        ({"Ethan": {"cond": 1}}, r"can't be read as speakers \(KeyError"),
        ({"Ethan": {"bos_token": 9999, "cond": torch.zeros(1, 8), "ref_mel": torch.zeros(1, 12, 20)}}, r"bos_token of speakers is .*wanted tokens of the thinker"),
    ],
    ids=["bytes", "none", "no token", "no token of the thinker"],
)
def test_a_file_of_speakers_that_is_none_is_refused(content: Any, reason: str, tmp_path: Path, pair: Pair) -> None:
    from zoo.errors import ConfigError
    from zoo.models.qwen25_omni.speech_codes import Qwen25SpeechCodes

    path = tmp_path / "spk_dict.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ConfigError, match=reason):
        Qwen25SpeechCodes.build(pair.hf.config, pair.zoo.assembly.processor.tokenizer, str(tmp_path))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"embedding_size": 48}, "talker_config.embedding_size is 48; wanted the thinker's hidden_size 44"),
        ({"tie_word_embeddings": True}, "talker_config.tie_word_embeddings is True; wanted False"),
        ({"pad_token_id": 3}, "talker_config.pad_token_id is 3; wanted None"),
        ({"tts_codec_mask_token_id": 46}, r"tts_codec_\.\.\._token_id .* wanted 0 to 45"),
        ({"tts_text_pad_token_id": 386}, r"tts_text_\.\.\._token_id .* wanted 0 to 385"),
    ],
    ids=str,
)
def test_a_talker_that_is_not_built_is_refused(keys: dict, reason: str) -> None:
    from support.tiny_qwen25_talker import whole_config

    from zoo.errors import UserError
    from zoo.models.qwen25_omni.config import Qwen25OmniConfig

    config = Qwen25OmniConfig(whole_config(talker=keys))
    with pytest.raises(UserError, match=reason):
        config.checked_talker()


def test_a_thinker_is_trained_as_before_and_carries_the_talker(pair: Pair, tmp_path: Path, cpu_world: Any) -> None:
    """Without the loss of speech no talker is built, and an export has it byte for byte."""
    thinker = Zoo.load(pair.folder, cpu_world, "model.family=qwen25_omni")
    assert not hasattr(thinker.model, "talker")
    same(tensors(export(thinker, tmp_path / "export", pair.folder)), tensors(pair.folder))
    same(tensors(export(pair.zoo, tmp_path / "whole", pair.folder)), tensors(pair.folder))
    for folder in ("export", "whole"):
        assert (tmp_path / folder / "spk_dict.pt").read_bytes() == (pair.folder / "spk_dict.pt").read_bytes()
