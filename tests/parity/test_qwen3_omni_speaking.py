"""zoo says what transformers' `generate(return_audio=True)` says, code by code: greedily, and drawn with the same seeds."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.engine import Zoo, packed_batch
from support.rows import Example, make_examples
from support.spoken import SPEAKERS, listening
from support.tiny_talker import write_tiny_talker

from zoo.generation.speaking import Voice, say

# transformers' talker can't place sound beside pictures: its config has no audio_config.
ROWS = ("text-short", "text-long", "image-short", "multi_image-long", "video-long", "audio-long", "turns")
VOICES = {
    "greedy": Voice(talker_max_new_tokens=12, talker_temperature=0),
    "no penalty": Voice(talker_max_new_tokens=4, talker_temperature=0, talker_repetition_penalty=1.0),
    "drawn": Voice(talker_max_new_tokens=24, seed=5),
    "from few": Voice(
        talker_max_new_tokens=12, talker_temperature=1, talker_top_k=0, talker_top_p=0.9, talker_repetition_penalty=1.3
    ),
}


@dataclass(frozen=True)
class Pair:
    folder: Path
    hf: Any
    zoo: Zoo
    examples: dict[str, Example]

    def said(self, name: str, number: int, voice: Voice) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """zoo's sample of prompt and answer, transformers' codes (F, codebooks) and its sound."""
        tokens, example = self.zoo.step().speech_tokens, self.examples[name]
        ids, speaker = example.sample.input_ids, SPEAKERS[number % 2]
        starts = ((ids[:-1] == tokens.start) & (ids[1:] == tokens.assistant)).nonzero()[:, 0]
        prompt = {**example.features, "input_ids": ids[None, : int(starts[-1]) + 3]}
        prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
        specials = [*range(tokens.start, self.hf.config.thinker_config.text_config.vocab_size), tokens.end]
        settings = {name: value for name, value in vars(voice).items() if name != "seed"}
        temperature = settings.pop("talker_temperature")
        drawn = (
            {"talker_do_sample": True, "talker_temperature": temperature}
            if temperature
            else {"talker_do_sample": False}
        )
        torch.manual_seed(voice.seed * 1_000_003 + number)
        with listening(self.hf) as heard:
            answer, sound = self.hf.generate(
                **prompt, speaker=speaker, return_audio=True, thinker_do_sample=False, thinker_max_new_tokens=3 + 2 * number,
                thinker_suppress_tokens=specials, **settings, **drawn,
            )  # fmt: skip
        grown = replace(example.sample, input_ids=answer[0, :-1], labels=torch.full_like(answer[0, :-1], -100))
        codes = torch.stack(heard.frames)
        return self.zoo.assembly.processor.speech.to_say(grown, speaker), codes, sound


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any, cpu_world: Any) -> Iterator[Pair]:
    folder = write_tiny_talker(tmp_path_factory.mktemp("talker"), accept_hidden_layer=3)
    hf = tiny.load_plain(folder)
    zoo = Zoo.load(folder, cpu_world, "train.speech_loss=1", "model.freeze=[vision,audio,language]")
    zoo.model.eval()
    return Pair(folder, hf, zoo, make_examples(tiny.processor("qwen3_omni", hf.config)))


@pytest.mark.parametrize("voice", VOICES)
def test_codes(voice: str, pair: Pair) -> None:
    """Rows that are said together, those of transformers one by one; some end, others are cut."""
    settings = VOICES[voice]
    samples, wanted, _ = zip(*(pair.said(name, number, settings) for number, name in enumerate(ROWS)), strict=True)
    found = say(pair.zoo.model, pair.zoo.step(), packed_batch(samples), range(len(samples)), settings)
    assert [codes.tolist() for codes, _ in found] == [codes.tolist() for codes in wanted]
    lengths = {len(codes) for codes, _ in found}
    if voice == "drawn":
        assert len(lengths) > 1, "all of one length: none has ended by itself"


def test_a_speech_whose_end_comes_at_the_limit_is_whole(pair: Pair) -> None:
    sample, codes, _ = pair.said("text-short", 0, VOICES["drawn"])
    assert 1 < len(codes) < VOICES["drawn"].talker_max_new_tokens - 1
    for most, whole in ((len(codes) + 1, True), (len(codes), False)):
        voice = replace(VOICES["drawn"], talker_max_new_tokens=most)
        [(found, ended)] = say(pair.zoo.model, pair.zoo.step(), packed_batch([sample]), [0], voice)
        assert found.tolist() == codes[: most - 1].tolist() and ended == whole


def test_rows_that_can_not_be_written_or_spoken_are_left_out(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any is answered, as data.on_error says; the others are said."""
    from zoo.data.errors import RowError
    from zoo.data.loading.bad_rows import BadRows
    from zoo.data.sources.references import Access
    from zoo.data.sources.rows import make_row
    from zoo.generation.decoding import Decoding
    from zoo.generation.sampling import Sampling
    from zoo.tools.speaking.speak import Speaking

    (tmp_path / "speech").mkdir()
    messages = [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "1 2"}]
    good = make_row({"messages": messages, "speaker": "Ethan"}, "rows:1", Access(tmp_path))
    boxes, heard = replace(good, boxes=((0, 0, 1, 1),)), replace(good, use_audio_in_video=True)
    zoo = pair.zoo
    monkeypatch.setattr(zoo.assembly.processor, "speaks", False)  # as of every prompt
    recipe = zoo.recipe.replace({"data.on_error": "skip"})
    decoding = Decoding(zoo.assembly, [zoo.model], recipe, zoo.world, Sampling(2), ())
    bad = BadRows(recipe.data)
    speaking = Speaking(decoding, 4, bad, VOICES["greedy"], tmp_path, None, True, None)
    results = speaking.all([boxes, good, heard], range(3))
    assert list(results) == [1] and (tmp_path / results[1]["speech"]).exists()
    assert bad.counts == {"bad_row": 1, "speech": 1}
    with pytest.raises(RowError, match="can't be spoken: use_audio_in_video is true: transformers' talker does not"):
        speaking.prompt(heard)


def constant(samples: Any, rate: int) -> Any:
    """A codec that says how many thousand samples there are, in four codebooks."""
    return torch.full((round(len(samples) / rate * 12.5), 4), len(samples) // 1000)


def test_a_row_whose_speech_is_a_sound(pair: Pair, tmp_path: Path) -> None:
    """The processor of a run with data.codec takes a sound file for codes, and rows of codes as before."""
    import numpy as np
    import soundfile

    from zoo.data.sources.references import Access
    from zoo.data.sources.rows import make_row
    from zoo.packing.spoken import FRAMES

    soundfile.write(tmp_path / "said.wav", 0.1 * np.ones(24_000), 24_000)
    processor = pair.zoo.assembly.processor
    messages = [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "1 2"}]
    processor.train_speech(f"{__file__}:constant")
    for speech, wanted in (("said.wav", [[24] * 4] * 12), ([[1, 2, 3, 4]] * 9, [[1, 2, 3, 4]] * 9)):
        row = make_row({"messages": messages, "speech": speech, "speaker": "Ethan"}, "rows:1", Access(tmp_path))
        sample = processor.encode(row, video_fps=2.0, max_frames=8)
        assert sample.media[FRAMES].tolist() == wanted
