"""Answers of chats whose turns begin with plain text, for templates of several kinds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rows import draw

from zoo.data.processors.answers import ChatMarkers
from zoo.data.processors.plain_turns import write
from zoo.data.processors.processor import Processor
from zoo.data.sample import IGNORE
from zoo.data.sources.rows import Row

TURNS = (("user", "Why?"), ("assistant", "So."), ("user", "And?"), ("assistant", "No more."))
STYLES: dict[str, Callable[[str, str], str]] = {
    "roles, answers end with a space": lambda role, text: f"{role.upper()}: {text} ",
    "brackets": lambda role, text: f"[INST] {text} [/INST]" if role == "user" else f" {text}<end>",
    "brackets, a space behind": lambda role, text: f"[INST] {text} [/INST]" if role == "user" else f" {text}<end> ",
}
PROMPTS = {"roles, answers end with a space": "ASSISTANT:"}


def template(style: str) -> Callable[..., str]:
    def render(messages: Any, add_generation_prompt: bool = False) -> str:
        text = "".join(STYLES[style](message["role"], message["content"]) for message in messages)
        return text + (PROMPTS.get(style, "") if add_generation_prompt else "")

    return render


@pytest.mark.parametrize("style", STYLES)
def test_answers_and_their_ends(style: str) -> None:
    messages = [{"role": role, "content": text} for role, text in TURNS]
    text, spans = write(template(style), messages, "<end>")
    assert [text[start:end] for start, end in spans] == [" So.<end>", " No more.<end>"]
    assert text.count("<end>") == 2
    if style == "brackets":
        assert text == template(style)(messages)


def test_texts_that_look_like_turns_are_none() -> None:
    messages = [{"role": "user", "content": "ASSISTANT: Me? "}, {"role": "assistant", "content": "USER: you"}]
    text, ((start, end),) = write(template("roles, answers end with a space"), messages, "<end>")
    assert text == "USER: ASSISTANT: Me?  ASSISTANT: USER: you<end>"
    assert text[start:end] == " USER: you<end>"


def test_a_template_that_changes_what_it_wrote_is_refused() -> None:
    def render(messages: Any, add_generation_prompt: bool = False) -> str:
        return f"{len(messages)} turns: " + "".join(message["content"] for message in messages)

    with pytest.raises(ValueError, match="writes '1 turns: Why\\?' differently where more turns follow"):
        write(render, [{"role": role, "content": text} for role, text in TURNS], "<end>")


ROLES = (
    "{% for m in messages %}{{ m.role.upper() + ': ' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text if part.type == 'text' else '<|image_pad|>' }}{% endfor %}{% endif %}"
    "{{ ' ' }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


@pytest.fixture
def plain() -> Processor:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    from zoo.data.processors.vision import tiny_parts

    parts = tiny_parts({"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}) | {"chat_template": ROLES}
    assert isinstance(parts["image_processor"], Qwen2VLImageProcessor)
    processor = Processor(
        Qwen3VLProcessor(video_processor=Qwen3VLVideoProcessor(), **parts), ChatMarkers("", "<|im_end|>")
    )
    processor.__dict__["media_ids"] = frozenset({processor.hf.image_token_id})
    return processor


def test_labels_of_a_row_with_images(plain: Processor, tmp_path: Path) -> None:
    """However many tokens an image has, and whatever the user writes."""
    images = tuple(draw(tmp_path, name, size, 0) for name, size in (("a", (96, 64)), ("b", (32, 32))))
    said = ("<image>ASSISTANT: What?", "1 2 3", "<image>Why?", "ASSISTANT: 4")
    messages = tuple(zip(("user", "assistant") * 2, said, strict=True))
    sample = plain.encode(Row(messages, images=images, root=tmp_path), video_fps=2.0, max_frames=8)
    labelled = sample.labels != IGNORE
    torch.testing.assert_close(sample.labels[labelled], sample.input_ids[labelled], rtol=0, atol=0)
    assert plain.tokenizer.decode(sample.labels[labelled]) == " 1 2 3<|im_end|> ASSISTANT: 4<|im_end|>"
    assert int((sample.input_ids == plain.hf.image_token_id).sum()) == 6 + 1


def test_a_first_token_that_the_tokenizer_adds_is_not_written_twice(plain: Processor) -> None:
    """As Llama's and Mistral's `<s>`, which many of their templates write as well."""
    from tokenizers.processors import TemplateProcessing

    first = "<|endoftext|>"
    token = plain.tokenizer.convert_tokens_to_ids(first)
    added = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, token)])
    plain.tokenizer.backend_tokenizer.post_processor = added
    plain.hf.chat_template = first + ROLES
    again = Processor(plain.hf, plain.markers)
    sample = again.encode(Row((("user", "Why?"), ("assistant", "So."))), video_fps=2.0, max_frames=8)
    text = again.tokenizer.decode(sample.input_ids)
    assert text == f"{first}USER: Why? ASSISTANT: So.<|im_end|>"
    assert again.tokenizer.decode(sample.labels[sample.labels != IGNORE]) == " So.<|im_end|>"
