"""zoo says what transformers' `generate(return_audio=True)` says, code by code: greedily, and drawn with the same seeds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from support.engine import packed_batch
from support.spoken import SPEAKERS, Heard, Pair
from support.spoken_qwen3 import Qwen3Pair
from support.spoken_qwen25 import Qwen25Pair

from zoo.generation.speaking import Voice, say
from zoo.tools.speaking.vocoder import Vocoder

PAIRS = {"qwen3": Qwen3Pair, "qwen25": Qwen25Pair}
OF_QWEN3 = pytest.mark.parametrize("pair", ["qwen3"], indirect=True)
VOICES = {
    "greedy": Voice(talker_max_new_tokens=12, talker_temperature=0),
    "no penalty": Voice(talker_max_new_tokens=4, talker_temperature=0, talker_repetition_penalty=1.0),
    "drawn": Voice(talker_max_new_tokens=24, seed=5),
    "from few": Voice(
        talker_max_new_tokens=12, talker_temperature=1, talker_top_k=0, talker_top_p=0.9, talker_repetition_penalty=1.3
    ),
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: Any, tmp_path_factory: Any, cpu_world: Any) -> Pair:
    pair = PAIRS[request.param].load(tmp_path_factory.mktemp("talker"), cpu_world)
    pair.zoo.model.eval()
    return pair


def said(pair: Pair, names: Sequence[str], voice: Voice) -> tuple[list[Any], list[Heard]]:
    """zoo's samples of prompts and answers, and what transformers says, row by row."""
    settings = {name: value for name, value in vars(voice).items() if name != "seed"}
    if not settings["talker_temperature"]:
        del settings["talker_temperature"]
    samples, every = [], []
    for number, name in enumerate(names):
        torch.manual_seed(voice.seed_of(number))
        heard = pair.listen(name, number, 2 + 2 * number, talker_do_sample=voice.talker_temperature > 0, **settings)
        ids = heard.answer[:-1]
        grown = replace(pair.examples[name].sample, input_ids=ids, labels=torch.full_like(ids, -100))
        samples.append(pair.speech.to_say(grown, SPEAKERS[number % 2]))
        every.append(heard)
    return samples, every


@pytest.mark.parametrize("voice", VOICES)
def test_codes(voice: str, pair: Pair) -> None:
    """Rows that are said together, those of transformers one by one; some end, others are cut."""
    settings = VOICES[voice]
    samples, wanted = said(pair, pair.names, settings)
    found = say(pair.zoo.model, pair.zoo.step(), packed_batch(samples), range(len(samples)), settings)
    assert [codes.tolist() for codes, _ in found] == [[frame.tolist() for frame in heard.frames] for heard in wanted]
    lengths = {len(codes) for codes, _ in found}
    if voice == "drawn":
        assert len(lengths) > 1, "all of one length: none has ended by itself"


def test_a_speech_whose_end_comes_at_the_limit_is_whole(pair: Pair) -> None:
    samples, wanted = said(pair, pair.names, VOICES["drawn"])
    most = VOICES["drawn"].talker_max_new_tokens
    number, codes = next((n, heard.frames) for n, heard in enumerate(wanted) if 1 < len(heard.frames) < most - 1)
    for limit, whole in ((len(codes) + 1, True), (len(codes), False)):
        voice = replace(VOICES["drawn"], talker_max_new_tokens=limit)
        [(found, ended)] = say(pair.zoo.model, pair.zoo.step(), packed_batch([samples[number]]), [number], voice)
        kept = codes if whole or pair.codebooks == 1 else codes[:-1]  # a last frame that is cut has no residual codes
        assert found.tolist() == [frame.tolist() for frame in kept] and ended == whole


def test_sound(pair: Pair, tmp_path: Path) -> None:
    """A wav file holds the waveform that transformers' `generate` gives for the seed, to 16 bit."""
    voice = replace(VOICES["greedy"], seed=3)
    samples, wanted = said(pair, pair.names, voice)
    vocoder = Vocoder.load(pair.zoo.assembly, pair.zoo.world.device)
    found = say(pair.zoo.model, pair.zoo.step(), packed_batch(samples), range(len(samples)), voice)
    rows = [number for number, (codes, _) in enumerate(found) if len(codes)]
    assert len(rows) > 1
    for number in rows:
        speaker = SPEAKERS[number % 2]
        vocoder.write(found[number][0], pair.speech.voice(speaker), voice.seed_of(number), tmp_path / "said.wav")
        sound, rate = soundfile.read(tmp_path / "said.wav", dtype="float32")
        assert abs(len(sound) * pair.speech.hertz / rate - len(found[number][0])) < 1
        assert float((torch.from_numpy(sound) - wanted[number].sound.clip(-1, 1)).abs().max()) < 1e-4


@OF_QWEN3
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


@OF_QWEN3
def test_a_row_whose_speech_is_a_sound(pair: Pair, tmp_path: Path) -> None:
    """The processor of a run with data.codec takes a sound file for codes, and rows of codes as before."""
    import numpy as np

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
