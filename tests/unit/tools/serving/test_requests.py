"""Rows as requests: the bytes of their media, the ids of their calls, and what no request can say."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from zoo.data.sources.references import Access
from zoo.data.sources.rows import make_row
from zoo.tools.serving.requests import UnsendableRowError, chat_request


def request(root: Path, item: dict[str, Any], *, thoughts: bool = False) -> dict[str, Any]:
    return chat_request(make_row(item, "rows:1", Access(root)), thoughts=thoughts)


def chat(question: str, answer: str = "Yes.", **media: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **media}


def test_media_are_sent_as_their_files_are(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.mp4", "c.ogg"):
        (tmp_path / name).write_bytes(name.encode())
    row = chat("x<image>y<video><audio>", images=["a.jpg"], videos=["b.mp4"], audios=["c.ogg"])
    encoded = {name: base64.b64encode(name.encode()).decode() for name in ("a.jpg", "b.mp4", "c.ogg")}
    assert request(tmp_path, row)["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "x"},
                {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{encoded['a.jpg']}"}},
                {"type": "text", "text": "y"},
                {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{encoded['b.mp4']}"}},
                {"type": "audio_url", "audio_url": {"url": f"data:audio/ogg;base64,{encoded['c.ogg']}"}},
            ],
        },
        {"role": "assistant", "content": "Yes."},
    ]


def test_media_in_memory_are_written_without_loss(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    samples = np.random.default_rng(1).normal(size=(2, 1600)).astype(np.float32)
    audio = {"array": samples, "sampling_rate": 8000}
    row = chat("<image><audio>", images=[Image.fromarray(pixels)], audios=[audio])
    image_part, audio_part = request(tmp_path, row)["messages"][0]["content"]
    data = base64.b64decode(image_part["image_url"]["url"].partition("base64,")[2])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels)
    read, rate = soundfile.read(io.BytesIO(base64.b64decode(audio_part["input_audio"]["data"])), dtype="float32")
    assert audio_part["input_audio"]["format"] == "wav" and rate == 8000
    assert np.array_equal(read.T, samples)


def test_sound_is_named_as_openai_names_it(tmp_path: Path) -> None:
    for name, known in (("a.wav", "wav"), ("b.mp3", "mp3")):
        (tmp_path / name).write_bytes(b"sound")
        (part,) = request(tmp_path, chat("<audio>", audios=[name]))["messages"][0]["content"]
        assert part["input_audio"]["format"] == known


def test_results_of_tools_name_their_calls(tmp_path: Path) -> None:
    def call(name: str, **arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "arguments": arguments}}

    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call("f", x="ß"), call("g")]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "3"},
    ]
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "fg"]
    sent = request(tmp_path, {"messages": turns, "tools": tools})
    assert sent["tools"] == tools and sent["tool_choice"] == "none"
    calls = sent["messages"][1]["tool_calls"]
    assert [(call["id"], call["function"]["name"]) for call in calls] == [("call_0", "f"), ("call_1", "g")]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"x": "ß"}, {}]
    assert [message["tool_call_id"] for message in sent["messages"][2:4]] == ["call_0", "call_1"]


def test_thinking_stands_where_a_reasoning_parser_puts_it(tmp_path: Path) -> None:
    row = chat("?", "<think>\nhm\n</think>\n\nSo.")
    assert request(tmp_path, row)["messages"][1]["content"] == row["messages"][1]["content"]
    message = request(tmp_path, row, thoughts=True)["messages"][1]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("So.", "hm", "hm")


@pytest.mark.parametrize(
    ("media", "reason"),
    [
        ({"images": [{"path": "a.png", "max_pixels": 4096}]}, "can't say max_pixels of a single image"),
        ({"videos": [["a.png", "a.png"]]}, "no video as a list of frames"),
        ({"videos": [{"path": "a.png", "fps": 1.0}]}, "can't say fps of a single video"),
        ({"videos": ["a.png"], "use_audio_in_video": True}, "audio to be heard"),
    ],
)
def test_what_no_request_says(media: dict[str, Any], reason: str, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    mark = "<image>" if "images" in media else "<video>"
    with pytest.raises(UnsendableRowError, match=reason):
        request(tmp_path, chat(mark, **media))
