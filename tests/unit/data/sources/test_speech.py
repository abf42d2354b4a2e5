"""What rows may give as speech, and what is said of codes that are none."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from zoo.data.errors import RowError
from zoo.data.media.codes import count_frames, find_codec, load_codes, with_codes
from zoo.data.media.decoder import InProcessDecoder
from zoo.data.sources.identity import row_digest
from zoo.data.sources.references import Access, Blob
from zoo.data.sources.rows import Row, make_row
from zoo.errors import UserError

CODES = np.arange(12).reshape(4, 3)


def row(folder: Path, **keys: Any) -> Row:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1 2"}]
    return make_row({"messages": messages, **keys}, "rows:1", Access(folder))


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["list", "array", "array of arrays", "path", "bytes", "a data set's bytes", "int16"])
def test_codes_as_rows_give_them(kind: str, tmp_path: Path) -> None:
    (tmp_path / "codes.npy").write_bytes(npy(CODES))
    frames = np.empty(4, dtype=object)  # a column of lists, as parquet gives it
    frames[:] = list(CODES)
    speech = {
        "list": CODES.tolist(),
        "array": CODES,
        "array of arrays": frames,
        "path": "codes.npy",
        "bytes": npy(CODES),
        "a data set's bytes": {"bytes": npy(CODES), "path": "codes.npy"},
        "int16": npy(CODES.astype(np.int16)),
    }[kind]
    found = row(tmp_path, speech=speech, speaker="Ethan")
    assert (found.speaker, load_codes(found).tolist()) == ("Ethan", CODES.tolist())
    assert isinstance(found.speech, str) == (kind == "path")
    assert found == row(tmp_path, speech=speech, speaker="Ethan")


@pytest.mark.parametrize(
    "speech", [[3, 0, 7], np.array([3, 0, 7]), npy(np.array([3, 0, 7])), [[3], [0], [7]]], ids=type
)
def test_codes_of_one_codebook(speech: Any, tmp_path: Path) -> None:
    assert load_codes(row(tmp_path, speech=speech)).tolist() == [[3], [0], [7]]


def test_a_row_without_speech(tmp_path: Path) -> None:
    assert row(tmp_path).speech is None
    asked = row(tmp_path, speaker="Ethan")  # to be spoken
    assert (asked.speech, asked.speaker) == (None, "Ethan")


@pytest.mark.parametrize(
    ("speech", "reason"),
    [
        ([], "array of float64 of shape .0,"),
        ([[1, 2], [3]], "no array; whole numbers"),
        ([1, [2]], "no array; whole numbers"),
        ([[1.5, 2.0]], "array of float64 of shape"),
        ([[True]], "array of bool"),
        ([[-1, 2]], "a code -1"),
        ([[0]] * 20_001, "over the limit of 20000"),
        (7, "a path, bytes"),
        ("../codes.npy", "leads out of"),
    ],
    ids=str,
)
def test_what_is_no_speech_is_refused(speech: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(RowError, match=reason):
        make_row(
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "speech": speech},
            "rows:1",
            Access(tmp_path, outside=False),
        )


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    found = row(tmp_path, speech="none.npy")
    for call in (found.check_files, lambda: load_codes(found)):
        with pytest.raises(RowError, match=r"rows:1: .*none[.]npy"):
            call()


def test_other_codes_are_another_row(tmp_path: Path) -> None:
    codes = [CODES, CODES + 1, CODES.T]
    rows = [row(tmp_path), row(tmp_path, speech=CODES, speaker="a"), *(row(tmp_path, speech=x) for x in codes)]
    assert len({row_digest(found) for found in rows}) == len(rows)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"no numpy", "rows:1.*an npy file"),
        (npy(CODES)[:-8], "rows:1.*an npy file"),
        (npy(np.array([{"a": 1}], dtype=object)), "1 values of object"),
        (npy(CODES * 1.0), "12 values of float64"),
        (npy(CODES[None]), "shape .1,"),
        (npy(CODES - 1), "a code -1"),
        (npy(CODES).replace(b"(4, 3)", b"(4e9,3)"), "an npy file"),
        (npy(CODES).replace(b"(4, 3), }   ", b"(4000000, 3), }"), "12000000 values"),
    ],
    ids=[
        "text", "cut off", "objects", "floats", "one codebook", "negative", "a shape that is none", "more than there is"
    ],
)  # fmt: skip
def test_files_that_hold_no_codes(data: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(RowError, match=reason):
        load_codes(row(tmp_path, speech=Blob(data, "codes.npy")))


HERTZ = 12.5


def by_level(samples: np.ndarray, rate: int) -> np.ndarray:
    """A codec of two codebooks: how loud each frame is, in two steps."""
    size = int(rate / HERTZ)
    levels = np.abs(samples[: len(samples) // size * size].reshape(-1, size)).mean(1)
    return np.stack((np.minimum(levels * 10, 9), levels * 100 % 10), 1).astype(np.int32)


def in_one_book(samples: np.ndarray, rate: int) -> list[int]:
    return [1] * round(len(samples) / rate * HERTZ)


def too_many(samples: np.ndarray, rate: int) -> np.ndarray:
    return np.zeros((len(samples) * 50 // rate, 2), dtype=int)


def failing(samples: np.ndarray, rate: int) -> np.ndarray:
    raise KeyError("weights")


def no_codes(samples: np.ndarray, rate: int) -> np.ndarray:
    return samples


def sound(folder: Path, seconds: float = 2.0) -> Path:
    samples = np.concatenate((np.zeros(int(24000 * seconds / 2)), 0.5 * np.ones(int(24000 * seconds / 2))))
    soundfile.write(folder / "said.wav", samples, 24000)
    return folder / "said.wav"


def test_sound_is_encoded_by_the_users_codec(tmp_path: Path) -> None:
    sound(tmp_path)
    asked = row(tmp_path, speech="said.wav")
    found = load_codes(with_codes(asked, f"{__file__}:by_level", HERTZ, InProcessDecoder()))
    assert found.shape == (25, 2) and found[:12, 0].tolist() == [0] * 12 and found[13:, 0].tolist() == [5] * 12
    one = load_codes(with_codes(asked, f"{__file__}:in_one_book", HERTZ, InProcessDecoder()))
    assert one.tolist() == [[1]] * 25
    codes = row(tmp_path, speech=CODES)
    assert with_codes(codes, f"{__file__}:failing", HERTZ, InProcessDecoder()) is codes


@pytest.mark.parametrize(
    ("codec", "reason"),
    [
        ("failing", "refuses said.wav: KeyError: 'weights'"),
        ("too_many", "makes 100 frames of the 2 s of said.wav; 25 are wanted, 12.5 a second"),
        ("no_codes", "what .* makes of said.wav is an array of float32"),
    ],
)
def test_what_a_codec_may_not_do(codec: str, reason: str, tmp_path: Path) -> None:
    sound(tmp_path)
    with pytest.raises(RowError, match=f"rows:1: .*data.codec=.*:{codec} ?{reason}|rows:1: {reason}"):
        with_codes(row(tmp_path, speech="said.wav"), f"{__file__}:{codec}", HERTZ, InProcessDecoder())


def test_a_codec_that_is_not_there() -> None:
    for name, reason in (("no_such_module:encode", "can't be imported"), (f"{__file__}:HERTZ", "it is no function")):
        with pytest.raises(UserError, match=f"data.codec=.*{reason}"):
            find_codec(name)


def test_frames_are_counted_by_headers(tmp_path: Path) -> None:
    decoder = InProcessDecoder()
    soundfile.write(tmp_path / "said.wav", np.zeros(36_000, dtype=np.float32), 24_000)
    sound = row(tmp_path, speech="said.wav")
    assert count_frames(sound, 12.5, decoder) == 19  # of 1.5 s
    assert count_frames(sound, None, decoder) is None
    assert [count_frames(row(tmp_path, speech=speech), None, decoder) for speech in (CODES, [3, 0], npy(CODES))] == [
        4,
        2,
        4,
    ]
    for name, content in (("gone.npy", None), ("cut.npy", npy(CODES)[:20]), ("none.npy", npy(np.array(3)))):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert count_frames(row(tmp_path, speech=name), 12.5, decoder) is None
