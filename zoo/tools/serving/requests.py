"""A row as a client sends it to an OpenAI-compatible server: chat messages with media as data URLs, tools and their calls."""

from __future__ import annotations

import base64
import io
import json
import mimetypes
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from zoo.data.media.images import oddities_of
from zoo.data.media.opening import open_binary
from zoo.data.processors.chat import chat_messages, with_thoughts
from zoo.data.sources.references import AudioSamples, FrameList, Medium, OpenImage, settings_of_medium, without_settings
from zoo.data.sources.rows import Row
from zoo.types import JsonObject

_DEFAULT_TYPES = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}
_SOUNDS = {
    "audio/wav": "wav",
    "audio/x-wav": "wav",
    "audio/mpeg": "mp3",
}  # OpenAI's formats; others go as URLs, as vLLM has them


class UnsendableRowError(Exception):
    """A row that no request can express, and why."""


def chat_request(row: Row, *, thoughts: bool) -> JsonObject:
    """`messages` and `tools` of a row's chat request, its answers included.

    Args:
        row: a conversation.
        thoughts: whether thinking is sent beside an answer's content, as servers with a reasoning parser return it.

    Raises:
        UnsendableRowError: the row asks for something that requests can't say.
        RowError: a media file is missing.
    """
    if row.use_audio_in_video:
        raise UnsendableRowError("a request can't ask for a video's audio to be heard")
    messages = chat_messages(row)
    if thoughts:
        messages = [_with_reasoning(message) for message in with_thoughts(messages)]
    media = {"image": iter(row.images), "video": iter(row.videos), "audio": iter(row.audios)}
    open_calls: list[str] = []
    for message in messages:
        if isinstance(message["content"], list):
            message["content"] = [
                part if part["type"] == "text" else _media_part(row, part["type"], next(media[part["type"]]))
                for part in message["content"]
            ]
        for call in message.get("tool_calls", ()):
            open_calls.append(f"call_{len(open_calls)}")
            call["id"] = open_calls[-1]
            call["function"] = {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            }
    _answer_calls(messages, iter(open_calls))
    tools = {"tools": json.loads(row.tools), "tool_choice": "none"} if row.tools else {}  # no parser of calls is needed
    return {"messages": messages, **tools}


def read_otherwise(row: Row) -> list[str]:
    """What a row's images have that servers read in ways of their own; zoo's is that of `zoo.data.media.images`."""
    oddities: set[str] = set()
    for medium in row.images:
        opened = row.opened(without_settings(medium))
        if isinstance(opened, OpenImage):
            oddities |= oddities_of(opened.image)
        elif not isinstance(opened, AudioSamples | FrameList):
            with open_binary(opened) as file:
                oddities |= oddities_of(file)
    return sorted(oddities)


def question_of(request: JsonObject) -> JsonObject:
    """A chat request without its last answer and what follows it."""
    messages = request["messages"]
    last = max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=len(messages))
    return {**request, "messages": messages[:last]}


def _with_reasoning(message: JsonObject) -> JsonObject:
    """The message with its thinking under vLLM's name too."""
    thought = message.get("reasoning_content")
    return message if thought is None else {**message, "reasoning": thought}


def _answer_calls(messages: Sequence[JsonObject], calls: Iterator[str]) -> None:
    """Give the results of tools the ids of their calls, in order."""
    for message in messages:
        if message["role"] == "tool" and (call := next(calls, None)) is not None:
            message["tool_call_id"] = call


def _media_part(row: Row, kind: str, medium: Medium) -> JsonObject:
    """A content part that holds a medium's file."""
    settings = settings_of_medium(medium)
    if settings is not None:
        names = ", ".join(name for name, _ in settings.values())
        raise UnsendableRowError(f"a request can't say {names} of a single {kind}")
    data, media_type = _file_of(row, kind, medium)
    encoded = base64.b64encode(data).decode()
    if media_type in _SOUNDS:
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": _SOUNDS[media_type]}}
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{media_type};base64,{encoded}"}}


def _file_of(row: Row, kind: str, medium: Medium) -> tuple[bytes, str]:
    """A medium's bytes, and their type ("image/png"): those of its file, or of one without loss that is written of it."""
    opened = row.opened(medium)
    buffer = io.BytesIO()
    if isinstance(opened, OpenImage):
        opened.image.save(buffer, "PNG")
        return buffer.getvalue(), "image/png"
    if isinstance(opened, AudioSamples):
        import soundfile

        samples = opened.samples
        channels_first = samples.ndim == 2 and samples.shape[0] < samples.shape[1]
        soundfile.write(buffer, samples.T if channels_first else samples, opened.rate, format="WAV", subtype="FLOAT")
        return buffer.getvalue(), "audio/wav"
    if isinstance(opened, FrameList):
        raise UnsendableRowError("a request has no video as a list of frames")
    with open_binary(opened) as file:
        guessed, _ = mimetypes.guess_type(PurePath(str(opened)).name)
        known = guessed is not None and guessed.startswith(f"{kind}/")
        return file.read(), guessed if known and guessed else _DEFAULT_TYPES[kind]
