"""Conversations as users of chat models have them, in OpenAI's form, for chat templates and tokenizers as published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIGITS = Path(__file__).parents[2] / "zoo" / "data" / "digits" / "heldout"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}

type Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A row: its messages, the functions that it offers, and what a model must know to take it (image, tools, ...)."""

    messages: list[Message]
    needs: frozenset[str] = frozenset()
    tools: Sequence[dict[str, Any]] = ()

    @property
    def row(self) -> dict[str, Any]:
        """The row as a file of zoo's has it."""
        return {"messages": self.messages} | ({"tools": list(self.tools)} if self.tools else {})


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(*parts: str | Path) -> Message:
    """A question: a text, or a list of texts and files."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return {"role": "user", "content": parts[0]}
    return {"role": "user", "content": [_part(part) for part in parts]}


def _part(part: str | Path) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": {".mp4": "video", ".wav": "audio"}.get(part.suffix, "image"), "path": str(part)}


def answer(text: str, *calls: tuple[str, dict[str, Any]], thought: str = "") -> Message:
    message: Message = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
        message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return message


def result(text: str) -> Message:
    return {"role": "tool", "content": text}


def talk(*messages: Message, needs: str = "", tools: Sequence[dict[str, Any]] = ()) -> Conversation:
    return Conversation(list(messages), frozenset(needs.split()), tools)


def conversations(image: Path, wide: Path, sound: Path) -> dict[str, Conversation]:
    """All of them by name, with these files and the bundled videos."""
    video, other = DIGITS / "v0000.mp4", DIGITS / "v0006.mp4"
    rain, both = ("get_weather", {"city": "Zürich", "days": 2}), (WEATHER, CLOCK)
    return {
        "plain": talk(user("What is 2 + 2?"), answer("4")),
        "system": talk(system("You are brief."), user("Who wrote Faust?"), answer("Goethe.")),
        "empty system": talk(system(""), user("Who wrote Faust?"), answer("Goethe.")),
        "turns": talk(user("A?"), answer("One."), user("B?"), answer("Two.\nAnd three."), user("C?"), answer("Four.")),
        "languages": talk(user("翻译:Ça va? 😀👩‍👩‍👧 مرحبا e\u0301"), answer("你好,très bien — ñandú. 🎉 हिन्दी")),
        "spaces": talk(user("Indent  it.\n\n\tSo?"), answer("def f(x):\n    return  x\n\n\nprint(f(1))")),
        "code": talk(system("Code."), user("Sort."), answer("```python\nsorted(x, key=lambda v: -v)\n```\nDone.")),
        "markup": talk(user("Is <b>this</b> <image> a tag? {{ x }} {% y %}"), answer("<p>No & yes</p> {{ z }}"), needs="text"),
        "numbers": talk(user("Count 1234567890 0.001"), answer("1,234,567,890 and 1e-3")),
        "long": talk(user("Go on. " * 400), answer("Well, then." * 300)),
        "thought": talk(user("Is 91 prime?"), answer("No.", thought="91 = 7 * 13."), needs="thinking"),
        "thoughts": talk(
            user("Is 91 prime?"), answer("No.", thought="7 * 13."),
            user("97?"), answer("Yes.", thought="Not 2, 3, 5, 7.\n\nSo it is."), needs="thinking",
        ),
        "thought within": talk(user("Is 91 prime?"), answer("<think>\n7 * 13\n</think>\n\nNo."), needs="thinking"),
        "tools unused": talk(user("Hello."), answer("Hello!"), needs="tools", tools=both),
        "call": talk(user("Rain?"), answer("", rain), needs="tools", tools=both),
        "call with words": talk(system("Help."), user("Rain?"), answer("I look.", rain), needs="tools", tools=both),
        "calls": talk(user("Rain now?"), answer("", rain, ("now", {})), needs="tools", tools=both),
        "result": talk(
            user("Rain?"), answer("", rain), result('{"rain": true}'), answer("Yes, take 雨伞."), needs="tools", tools=both
        ),
        "results": talk(
            system("Help."), user("Rain now?"), answer("", rain, ("now", {})), result("rain"), result("12:30"),
            answer("At 12:30, yes."), user("And in Rome?"), answer("", ("get_weather", {"city": "Rome"})), result("sun"),
            answer("No."), needs="tools", tools=both,
        ),
        "thought and call": talk(
            user("Rain?"), answer("", rain, thought="I need the weather."), result("rain"),
            answer("Yes.", thought="It rains."), needs="tools thinking", tools=both,
        ),
        "image": talk(user(image, "What is it?"), answer("A gradient."), needs="image"),
        "images": talk(user("First ", image, " and ", wide, " differ?"), answer("In width."), needs="image"),
        "images in turns": talk(
            system("Look."), user(wide, "Wide?"), answer("Yes."), user("This?", image), answer("No."), needs="image"
        ),
        "image and call": talk(
            user(image, "Rain there?"), answer("", rain), result("rain"), answer("Yes."), needs="image tools", tools=both
        ),
        "video": talk(user(video, "What happens?"), answer("Digits come."), needs="video"),
        "videos": talk(user(video, "or ", other, "?"), answer("The first."), needs="video"),
        "video and images": talk(
            user(image, video, "Match?"), answer("No."), user(wide, "And it?"), answer("Yes."), needs="image video"
        ),
        "sound": talk(user(sound, "Say it."), answer("A tone."), needs="audio"),
        "all media": talk(user(sound, image, "then ", video, "?"), answer("All."), needs="image video audio"),
    }  # fmt: skip
