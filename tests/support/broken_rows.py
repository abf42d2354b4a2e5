"""A hundred kinds of broken rows, as lines of one JSONL file beside the media that they name."""

from __future__ import annotations

import base64
import io
import json
import os
import struct
import wave
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image, PngImagePlugin

ANSWER = {"role": "assistant", "content": "7"}


@dataclass(frozen=True)
class Broken:
    """One line, why it is bad, and a part of what is said of it."""

    line: bytes
    cause: str
    words: str


def talk(question: Any = "Say 7.", answer: Any = "7") -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def broken_rows(folder: Path) -> dict[str, Broken]:
    """Name -> row; files are written into `folder`, one outside of it."""
    _write_files(folder)
    rows: dict[str, Broken] = {}

    def add(name: str, row: Any, cause: str, words: str) -> None:
        assert name not in rows, name
        line = row if isinstance(row, bytes) else json.dumps(row).encode()
        rows[name] = Broken(line, cause, words)

    _lines(add)
    _keys(add)
    _formats(add)
    _references(add, folder)
    _images(add)
    _videos(add)
    _sounds(add)
    _samples(add)
    return rows


def _lines(add: Any) -> None:
    good = json.dumps({"messages": talk()}).encode()
    for name, line, words in (
        ("cut off line", good[:-9], "broken JSON at column"),
        ("trailing comma", good[:-1] + b",}", "broken JSON at column"),
        ("single quotes", b"{'messages': []}", "property name enclosed in double quotes"),
        ("two objects", good + good, "Extra data"),
        ("a comment", b"// " + good, "broken JSON at column 1: Expecting value"),
        ("a bare word", b"messages", "broken JSON at column 1"),
        ("line break in a string", good.replace(b"Say", b"Say\t"), "Invalid control character"),
        ("broken escape", good.replace(b"Say", b"\\x41"), "Invalid \\escape"),
        ("zero byte", b"\0" + good, "broken JSON at column 1"),
        ("Latin-1", good.replace(b"Say", b"Caf\xe9"), "not UTF-8 at byte"),
        ("nested too deeply", b'{"messages": ' + b"[" * 100_000, "nested too deeply"),
        ("a list", b"[1, 2]", "the line is a JSON list"),
        ("a number", b"12", "the line is a JSON int"),
        ("a string", b'"hello"', "the line is a JSON str"),
        ("null", b"null", "the line is a JSON NoneType"),
    ):
        add(name, line, "bad_json", words)


def _keys(add: Any) -> None:
    user = {"role": "user", "content": "Say 7."}
    for name, row, words in (
        ("no messages", {}, "'messages' is missing"),
        ("no messages but others", {"prompt": "a", "completions": "b"}, "unknown key 'prompt'"),
        ("completion a number", {"prompt": "a", "completion": 7}, "'completion' is 7; a text or a list of messages"),
        ("alpaca without output", {"instruction": "a", "output": ["b"]}, "'output' is ['b']; a text is wanted"),
        ("history of no pairs", {"query": "a", "response": "b", "history": ["c"]}, "history[0] is 'c'; [question, answer] is wanted"),
        ("answers of nobody", {"question": "a", "answers": []}, "'answers' is []; a list of texts"),
        ("texts of the Cauldron a list of texts", {"images": [], "texts": ["a"]}, "texts[0] is 'a'; {'user', 'assistant'}"),
        ("chosen nothing", {"prompt": "a", "chosen": [], "rejected": "b"}, "'chosen' is []; a text or a list"),
        ("objects a list", {"messages": talk(), "objects": [1]}, "'objects' is [1]; {'ref', 'bbox'} is wanted"),
        ("boxes of three numbers", {"messages": talk("<bbox>"), "objects": {"bbox": [[1, 2, 3]]}}, "a list of [x1, y1, x2, y2]"),
        ("box of no image", {"messages": talk("<bbox>"), "objects": {"bbox": [[1, 2, 3, 4]]}}, "but the row has 0 images"),
        ("tools no JSON", {"messages": talk(), "tools": "add(a, b)"}, "tools is add(a, b), which is no JSON"),
        ("tools without names", {"messages": talk(), "tools": [{"type": "function"}]}, "tools[0] is {'type': 'function'}; a tool with 'name'"),
        ("a call without a name", {"messages": [user, {"role": "assistant", "tool_calls": [{"id": 1}]}]}, "messages[1].tool_calls is {'id': 1}; a call as"),
        ("arguments a list", {"messages": [user, {"role": "tool_call", "content": '{"name": "f", "arguments": [1]}'}]}, "messages[1].content.arguments is [1]; an object"),
        ("a call by the user", {"messages": [{**user, "tool_calls": [{"name": "f"}]}, ANSWER]}, "messages[0] has tool calls, but only"),
        ("messages empty", {"messages": []}, "'messages' is []"),
        ("messages a string", {"messages": "hi"}, "'messages' is hi"),
        ("messages an object", {"messages": user}, "'messages' is {'role'"),
        ("message a string", {"messages": ["hi"]}, "messages[0] has hi; exactly"),
        ("message without content", {"messages": [{"role": "user"}]}, "messages[0] has ['role']"),
        ("message without role", {"messages": [{"content": "x"}]}, "messages[0] has ['content']"),
        ("name a number", {"messages": [{**user, "name": 7}, ANSWER]}, "name is 7; a str is wanted"),
        ("message with a mood", {"messages": [{**user, "mood": "x"}, ANSWER]}, "'mood', 'role']"),
        ("role a list", {"messages": [{"role": ["user"], "content": "x"}]}, "has role ['user']"),
        ("role in capitals", {"messages": [user, {"role": "Assistant", "content": "x"}]}, "has role 'Assistant'"),
        ("content null", {"messages": talk(answer=None)}, "messages[1] has ['role']"),
        ("content a number", {"messages": talk(answer=7)}, "messages[1] has content of type int"),
        ("answers of two weights", {"messages": [user, ANSWER, {**ANSWER, "weight": 2}]}, "messages[1] and messages[2] are turns of the assistant in a row of weights 1 and 2"),
        ("answer behind a call", {"messages": [user, {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}, ANSWER]}, "the first calls tools; put the results"),
        ("two weights of an answer", {"messages": [user, {**ANSWER, "weight": 1, "loss_scale": 2}]}, "messages[1] has weight 1 and loss_scale 2"),
        ("reasoning a list", {"messages": [user, {**ANSWER, "reasoning": [1]}]}, "messages[1].reasoning is [1]; a text"),
        ("reasoning of the user", {"messages": [{**user, "reasoning_content": "x"}, ANSWER]}, "messages[0] has reasoning_content, but only"),
        ("two thoughts", {"messages": [user, {**ANSWER, "reasoning_content": "x", "reasoning": "y"}]}, "reasoning_content and reasoning, which differ"),
        ("a thought within tags", {"messages": [user, {**ANSWER, "reasoning_content": "x</think>"}]}, "has a tag of a thinking block"),
        ("a thought and a thought", {"messages": [user, {"role": "assistant", "content": "<think>a</think>b", "reasoning_content": "x"}]}, "keep one of them"),
        ("answer empty", {"messages": talk(answer="")}, "messages[1] is an empty assistant answer"),
        ("answer of spaces", {"messages": [user, *talk(answer=" \n")]}, "messages[2] is an empty assistant answer"),
        ("no answer", {"messages": [user]}, "no message has role 'assistant'"),
        ("half a surrogate", {"messages": talk("\ud83d")}, "messages[0] holds half of a surrogate pair"),
        ("unknown key", {"messages": talk(), "imagess": []}, "did you mean 'images'"),
        ("kind a number", {"messages": talk(), "kind": 3}, "kind is 3; a str is wanted"),
        ("weight a word", {"messages": talk(), "weight": "high"}, "weight of the row is high; a number"),
        ("weight negative", {"messages": talk(), "weight": -0.5}, "weight of the row is -0.5; a number from 0"),
        ("weight too large", b'{"messages": [], "weight": 1e999}'.replace(b"[]", json.dumps(talk()).encode()), "weight of the row is inf"),
        ("weight of a message", {"messages": [user, {**ANSWER, "weight": "no"}]}, "weight of messages[1] is no"),
        ("weight of a question", {"messages": [{**user, "weight": 1}, ANSWER]}, "messages[0] has a weight, but only"),
        ("weights multiply to infinity", {"messages": [user, {**ANSWER, "weight": 1e5}], "weight": 1e5}, "multiply to more than 1e+06"),
        ("sound of no video", {"messages": talk(), "use_audio_in_video": True}, "but the row has no video"),
        ("flag a word", {"messages": talk(), "use_audio_in_video": "yes"}, "use_audio_in_video is 'yes'; a bool"),
    ):  # fmt: skip
        add(name, row, "bad_row", words)


def _formats(add: Any) -> None:
    def turns(*items: Any) -> dict[str, Any]:
        return {"conversations": list(items)}

    gpt = {"from": "gpt", "value": "7"}
    for name, row, cause, words in (
        ("conversations empty", turns(), "bad_row", "'conversations' is []"),
        ("turn a string", turns("hi"), "bad_row", "conversations[0] is a str"),
        ("turn from nobody", turns({"value": "x"}), "bad_row", "conversations[0] is from None; wanted: human"),
        ("turn from a stranger", turns({"from": "bing", "value": "x"}), "bad_row", "is from 'bing'"),
        ("turn of a list", turns({"from": "human", "value": []}), "bad_row", "has a value of type list"),
        ("turn without answer", turns({"from": "system", "value": "x"}, *[{"from": "human", "value": "x"}] * 2, {"from": "gpt", "value": ""}), "bad_row", "messages[3] is an empty"),
        ("conversation lacks its image", turns({"from": "human", "value": "<image>"}, gpt), "placeholder_mismatch", "1 <image> in the messages but 0 in 'images'"),
        ("part a number", {"messages": talk([7])}, "bad_row", "messages[0].content[0] is 7; {'type'"),
        ("part without type", {"messages": talk([{"text": "x"}])}, "bad_row", "content[0] has type None; wanted: text"),
        ("part of text without text", {"messages": talk([{"type": "text"}])}, "bad_row", "content[0] has no 'text'"),
        ("part of an image without one", {"messages": talk([{"type": "image_url"}])}, "placeholder_mismatch", "names no image, and none is left"),
        ("two formats", {"messages": talk(), "conversations": [gpt]}, "format", "both 'messages' and 'conversations'"),
        ("text and messages", {"messages": talk(), "text": "7"}, "format", "format: messages or text"),
        ("a set of its own form", {"image": "good.png", "ground_truth": "{}"}, "format", "format: cord_v2"),
        ("text empty", {"text": ""}, "bad_row", "text is empty"),
        ("text a number", {"text": 7}, "bad_row", "text is of type int"),
    ):  # fmt: skip
        add(name, row, cause, words)


def _see(image: Any, mark: str = "<image>") -> dict[str, Any]:
    return {"messages": talk(f"{mark}What?"), "images": [image]}


def _references(add: Any, folder: Path) -> None:
    def uri(data: bytes) -> str:
        return f"data:image/png;base64,{base64.b64encode(data).decode()}"

    good = (folder / "good.png").read_bytes()
    for name, row, cause, words in (
        ("more images than marks", {**_see("good.png"), "images": ["good.png"] * 2}, "placeholder_mismatch", "1 <image> in the messages but 2"),
        ("more marks than images", _see("good.png", "<image><image><image>"), "placeholder_mismatch", "3 <image> in the messages but 1"),
        ("a mark of another kind", _see("good.png", "<video>"), "placeholder_mismatch", "0 <image> in the messages but 1"),
        ("a video without mark", {"messages": talk(), "videos": ["good.mp4"]}, "placeholder_mismatch", "0 <video>"),
        ("a sound without file", {"messages": talk("<audio>")}, "placeholder_mismatch", "1 <audio> in the messages but 0"),
        ("image twice", {**_see("good.png"), "image": "good.png"}, "bad_row", "both 'image' and 'images'"),
        ("images a string", {"messages": talk("<image>"), "images": "good.png"}, "bad_row", "images is good.png; a list"),
        ("image empty", _see(""), "bad_row", "images[0] is ; a path"),
        ("image a number", _see(5), "bad_row", "images[0] is 5; a path"),
        ("image null", _see(None), "bad_row", "images[0] is None; a path"),
        ("image of no bytes", _see({"bytes": None, "path": None}), "bad_row", "images[0] has the keys (none); bytes, path"),
        ("image an object", _see({"url": "good.png"}), "bad_row", "images[0] has the keys url"),
        ("path with a zero byte", _see("good\0.png"), "bad_row", "no path: embedded null"),
        ("path too long", _see("x" * 5000), "bad_row", "no path: File name too long"),
        ("no image", _see("no.png"), "missing_file", f"no file {folder}/no.png"),
        ("no video", {"messages": talk("<video>"), "video": "no.mp4"}, "missing_file", f"no file {folder}/no.mp4"),
        ("no sound", {"messages": talk("<audio>"), "audio": "no.wav"}, "missing_file", f"no file {folder}/no.wav"),
        ("a folder", _see("."), "missing_file", f"no file {folder}; "),
        ("a link to nothing", _see("dangling.png"), "missing_file", "dangling.png"),
        ("a path above", _see("../outside.png"), "outside_root", "../outside.png, which leads out of the data root"),
        ("a path elsewhere", _see(str(folder.parent / "outside.png")), "outside_root", "data.outside_root=true"),
        ("a link above", _see("above.png"), "outside_root", "above.png, which leads out"),
        ("a URL", _see("https://example.org/a.png"), "url", "the URL https://example.org/a.png"),
        ("a URL of a part", {"messages": talk([{"type": "image_url", "image_url": {"url": "http://example.org/b.png"}}])}, "url", "http://example.org/b.png"),
        ("another URL", _see("ftp://example.org/c.png"), "missing_file", "ftp:/example.org/c.png"),
        ("base64 with other letters", _see(uri(good)[:40] + "***"), "corrupt_media", "is no valid base64"),
        ("base64 not said", _see("data:image/png,abc"), "corrupt_media", "is no base64; data:image/png;base64,... is wanted"),
        ("base64 of nothing", _see("data:image/png;base64,"), "corrupt_media", "image data:image/png;base64, can't be used: cannot identify"),
        ("base64 of half an image", _see(uri(good[: len(good) // 2])), "corrupt_media", "image data:image/png;base64, can't be used: image file is truncated"),
    ):  # fmt: skip
        add(name, row, cause, words)


def _images(add: Any) -> None:
    for name, file, words in (
        ("image of no bytes at all", "empty.png", "empty.png can't be used: cannot identify image"),
        ("a page in place of an image", "page.jpg", "page.jpg can't be used: cannot identify image"),
        ("half a PNG", "half.png", "half.png can't be used: image file is truncated"),
        ("half a JPEG", "half.jpg", "half.jpg can't be used: image file is truncated"),
        ("half a GIF", "half.gif", "half.gif can't be used: image file is truncated"),
        ("half a WebP", "half.webp", "half.webp can't be used"),
        ("half a TIFF", "half.tif", "half.tif can't be used"),
        ("PNG with a wrong checksum", "checksum.png", "checksum.png can't be used: broken data stream"),
        ("image bomb", "bomb.png", "Image size (2500000000 pixels) exceeds limit"),
        ("bomb of text", "text_bomb.png", "text_bomb.png can't be used: Decompressed data too large"),
        ("PNG of zero width", "zero.png", "zero.png can't be used"),
        ("GIF of zero size", "zero.gif", "zero.gif can't be used"),
        ("floats of unknown range", "float.tif", "its pixels are 32-bit floats"),
        ("integers of unknown range", "wide.tif", "its pixels have 32 bits"),
        ("PostScript", "drawing.eps", "drawing.eps can't be used: cannot identify image"),
        ("SVG", "drawing.svg", "drawing.svg can't be used: cannot identify image"),
        ("sound in place of an image", "good.wav", "good.wav can't be used: cannot identify image"),
    ):
        add(name, _see(file), "corrupt_media", words)
    add("a line of pixels", _see("line.png"), "processor_error", "aspect ratio")


def _videos(add: Any) -> None:
    for name, file, words in (
        ("video of no bytes", "empty.mp4", "empty.mp4 can't be used: Invalid data"),
        ("text in place of a video", "page.mp4", "page.mp4 can't be used: Invalid data"),
        ("half a video", "half.mp4", "half.mp4 can't be used: Invalid data"),
        ("video of noise", "noise.mp4", "noise.mp4 can't be used"),
        ("sound in place of a video", "good.flac", "good.flac can't be used: it has no video track"),
        ("list of other files", "list.ffconcat", "list.ffconcat can't be used: Invalid data"),
        ("playlist", "list.m3u8", "list.m3u8 can't be used: Invalid data"),
    ):
        add(name, {"messages": talk("<video>"), "video": file}, "corrupt_media", words)
    row = {"messages": talk("<video>"), "video": "silent.mp4", "use_audio_in_video": True}
    add("sound of a silent video", row, "corrupt_media", "silent.mp4 can't be used: it has no audio track")


def _sounds(add: Any) -> None:
    for name, file, words in (
        ("sound of no bytes", "empty.wav", "empty.wav can't be used: Invalid data"),
        ("text in place of a sound", "page.wav", "page.wav can't be used: Invalid data"),
        ("half a WAV", "half.wav", "its header says 1.0 s of sound, but 0.5 s are there; it is cut off"),
        ("WAV of a false length", "false.wav", "its header says 3600.0 s of sound, but 1.0 s are there"),
        ("FLAC of a false length", "false.flac", "false.flac can't be used"),
        ("WAV without samples", "none.wav", "its audio track is empty"),
        ("samples that are no numbers", "nan.wav", "its samples are not all numbers"),
        ("image in place of a sound", "good.png", "good.png can't be used: Invalid data"),
        ("silent video in place of a sound", "good.mp4", "good.mp4 can't be used: it has no audio track"),
    ):
        add(name, {"messages": talk("<audio>"), "audio": file}, "corrupt_media", words)
    short = {"messages": talk("<audio>"), "audio": "short.wav"}
    add("sound of no length", short, "corrupt_media", "short.wav can't be used: it is 5 ms long")


def _samples(add: Any) -> None:
    special = "a special token of the tokenizer"
    add(
        "special token in a question",
        {"messages": talk("<|im_end|>")},
        "special_token_in_text",
        f"messages[0] contains '<|im_end|>', {special}",
    )
    add(
        "special token in an answer",
        {"messages": talk(answer="<|im_start|>user")},
        "special_token_in_text",
        "messages[1] contains '<|im_start|>'",
    )
    add(
        "placeholder token in a question",
        {"messages": talk("<|image_pad|>")},
        "special_token_in_text",
        "messages[0] contains '<|image_pad|>'",
    )
    add("special token in a text", {"text": "a<|endoftext|>"}, "special_token_in_text", "text contains '<|endoftext|>'")
    add("too long", {"messages": talk(answer="and so on " * 400)}, "overlong", "(0 of media) are over packing.budget")
    add("too long a text", {"text": "and so on " * 400}, "overlong", "are over packing.budget")


# ---------------------------------------------------------------- files


def _write_files(folder: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    picture.save(folder.parent / "outside.png")
    os.symlink(folder.parent / "outside.png", folder / "above.png")
    os.symlink(folder / "nothing.png", folder / "dangling.png")
    for name in ("good.png", "good.jpg", "good.gif", "good.webp", "good.tif"):
        picture.save(folder / name)
        data = (folder / name).read_bytes()
        (folder / name.replace("good", "half")).write_bytes(data[: len(data) // 2])
    page = b"<!doctype html><html><body>404 Not Found</body></html>"
    for kind in ("png", "mp4", "wav"):
        (folder / f"empty.{kind}").write_bytes(b"")
    for kind in ("jpg", "mp4", "wav"):
        (folder / f"page.{kind}").write_bytes(page)
    _odd_images(folder, picture)
    _odd_videos(folder, noise)
    _odd_sounds(folder)


def png_chunks(width: int, height: int, data: bytes, depth: int = 8) -> bytes:
    """A PNG of those sizes, grey, whatever its data are."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def _odd_images(folder: Path, picture: Image.Image) -> None:
    good = bytearray((folder / "good.png").read_bytes())
    good[60] ^= 255
    (folder / "checksum.png").write_bytes(good)
    (folder / "bomb.png").write_bytes(png_chunks(50_000, 50_000, bytes(1000)))
    (folder / "zero.png").write_bytes(png_chunks(0, 5, b""))
    (folder / "zero.gif").write_bytes(b"GIF89a\0\0\0\0\0\0\0,\0\0\0\0\0\0\0\0\0\x02\0;")
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", "a" * 2**26, zip=True)
    picture.save(folder / "text_bomb.png", pnginfo=text)
    Image.fromarray(np.ones((8, 8), np.float32)).save(folder / "float.tif")
    Image.fromarray(np.full((8, 8), 2**20, np.int32)).save(folder / "wide.tif")
    Image.new("RGB", (2000, 2)).save(folder / "line.png")
    (folder / "drawing.eps").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n")
    (folder / "drawing.svg").write_bytes(b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>')


def _odd_videos(folder: Path, noise: np.ndarray) -> None:
    with av.open(str(folder / "good.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=2)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for _ in range(6):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(noise, format="rgb24")))
        container.mux(stream.encode(None))
    whole = (folder / "good.mp4").read_bytes()
    (folder / "silent.mp4").write_bytes(whole)
    (folder / "half.mp4").write_bytes(whole[: len(whole) // 2])
    at = whole.index(b"mdat") + 4
    end = whole.index(b"moov") - 4
    (folder / "noise.mp4").write_bytes(whole[:at] + b"\xff" * (end - at) + whole[end:])
    (folder / "list.ffconcat").write_text("ffconcat version 1.0\nfile good.mp4\n")
    (folder / "list.m3u8").write_text("#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\ngood.mp4\n#EXT-X-ENDLIST\n")


def _odd_sounds(folder: Path) -> None:
    sound = (0.3 * np.sin(np.arange(16_000) / 7)).astype(np.float32)
    for name in ("good.wav", "good.flac"):
        soundfile.write(folder / name, sound, 16_000)
    data = (folder / "good.wav").read_bytes()
    (folder / "half.wav").write_bytes(data[: 44 + 16_000])
    at = data.index(b"data") + 4
    (folder / "false.wav").write_bytes(data[:at] + struct.pack("<I", 2 * 16_000 * 3600) + data[at + 4 :])
    flac = bytearray((folder / "good.flac").read_bytes())
    flac[21] |= 15  # the upper bits of the number of samples
    (folder / "false.flac").write_bytes(flac)
    with wave.open(str(folder / "none.wav"), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
    soundfile.write(folder / "short.wav", sound[:80], 16_000)
    sound[100] = np.nan
    file = io.BytesIO()
    soundfile.write(file, sound, 16_000, format="WAV", subtype="FLOAT")
    (folder / "nan.wav").write_bytes(file.getvalue())
