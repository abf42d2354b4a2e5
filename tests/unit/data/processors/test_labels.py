"""Labels and their weights: what they say is what the assistant says, under the templates of all families."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
import torch
from support import templates, tiny_gemma3, tiny_gemma4, tiny_internvl
from support.rows import draw
from support.tiny_llava import tiny_config
from support.tiny_omni import PROCESSOR_ARCH

from zoo.data.processors.labels import answer_begins, text_begins
from zoo.data.processors.processor import Processor
from zoo.data.processors.text import TextProcessor
from zoo.data.processors.timestamped import TimestampedProcessor
from zoo.data.sample import IGNORE, Sample
from zoo.data.sources.references import Access
from zoo.data.sources.rows import Row, RowError, make_row
from zoo.errors import ConfigError
from zoo.models.gemma3.processor import build_processor as build_gemma3
from zoo.models.gemma4.processor import build_processor as build_gemma4
from zoo.models.internvl.processor import build_processor as build_internvl
from zoo.models.llava.processor import LlavaProcessor
from zoo.models.llava.processor import build_processor as build_llava
from zoo.models.qwen3_omni.processor import build_processor as build_omni
from zoo.models.qwen25_omni.processor import build_processor as build_qwen25_omni
from zoo.models.qwen25_vl.processor import build_processor as build_qwen25

VISION = {"vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}}
END = "<|im_end|>"


def with_template(processor: Any, template: str | None) -> Processor:
    if template is not None:
        processor.hf.chat_template = template
    return processor


def text_alone(template: str) -> Processor:
    made = TextProcessor.build({})
    made.tokenizer.chat_template = template
    return made


def llava(kind: str, template: str) -> Processor:
    made = with_template(build_llava(tiny_config(kind)), template)
    return LlavaProcessor(made.hf, made.config)


def gemma3(template: str) -> Processor:
    return with_template(build_gemma3(tiny_gemma3.tiny_config()), template)


# Family and template -> the processor, and the part of an answer that the template writes.
def same(answer: str) -> str:
    return answer


FAMILIES: dict[str, tuple[Callable[[], Processor], Callable[[str], str]]] = {
    "bundled": (lambda: TimestampedProcessor.build(VISION), same),
    "qwen3_vl instruct": (lambda: with_template(TimestampedProcessor.build(VISION), templates.INSTRUCT), same),
    "qwen3_vl thinking": (lambda: with_template(TimestampedProcessor.build(VISION), templates.THINKING), same),
    "qwen25_vl": (lambda: with_template(build_qwen25(VISION), templates.QWEN25), same),
    "qwen25_omni": (
        lambda: with_template(build_qwen25_omni({**VISION, "audio_config": {"num_mel_bins": 80}}), templates.QWEN25),
        same,
    ),
    "gemma3": (lambda: gemma3(templates.GEMMA3), str.strip),
    "gemma4": (lambda: with_template(build_gemma4(tiny_gemma4.tiny_config()), templates.GEMMA4), str.strip),
    "internvl": (lambda: with_template(build_internvl(tiny_internvl.tiny_config()), templates.INTERNVL), same),
    "qwen3_omni": (lambda: with_template(build_omni(PROCESSOR_ARCH), templates.THINKING), same),
    "qwen35_vl": (lambda: with_template(TimestampedProcessor.build(VISION), templates.QWEN35), str.strip),
    "qwen3.8": (lambda: with_template(TimestampedProcessor.build(VISION), templates.QWEN38), str.strip),
    "qwen3": (lambda: text_alone(templates.QWEN3), same),
    "llava 1.5": (lambda: llava("llava", templates.LLAVA_15), lambda answer: " " + answer.rstrip()),
    "llava next, mistral": (lambda: llava("llava_next", templates.MISTRAL), lambda answer: " " + answer.rstrip()),
    "llava onevision": (lambda: llava("llava_onevision", templates.ONEVISION), same),
}
ANSWERS = {
    "plain": ["It is 12.40."],
    "turns": ["Yes.", "No.", "Both, in a way."],
    "the same answer again": ["Yes.", "Yes.", "Yes."],
    "role markers": ["USER: no ASSISTANT: yes", "assistant\nim_start", "[INST] x [/INST]", "<<SYS>>"],
    "trailing spaces": ["so  ", "so\n", "so \n\n"],
    "leading spaces": ["  indented", "\ttab", " one"],
    "tools": ['<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "<tool_response>3</tool_response>"],
    "code": ["```python\ndef f():\n    return '\\n'\n```", "{% raw %}{{ x }}{% endraw %}", "a\r\nb"],
    "letters": ["Zażółć gęślą jaźń 漢字 🙂🏳️‍🌈", "e\u0301 ﷽", "\u200b.\u200b"],
    "of one letter": ["7", "!", "a"],
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Processor, Callable[[str], str]]:
    make, writes = FAMILIES[request.param]
    return make(), writes


def encode(processor: Processor, row: Row, **options: Any) -> Sample:
    return processor.encode(row, video_fps=2.0, max_frames=8, **options)


def spoken(processor: Processor, sample: Sample) -> str:
    labelled = sample.labels != IGNORE
    torch.testing.assert_close(sample.labels[labelled], sample.input_ids[labelled], rtol=0, atol=0)
    return processor.tokenizer.decode(sample.labels[labelled], clean_up_tokenization_spaces=False)


def conversation(answers: list[str], system: str | None = "Be brief. ", question: str = "And?") -> Row:
    turns = [turn for answer in answers for turn in (("user", question), ("assistant", answer))]
    return Row((*((("system", system),) if system else ()), *turns), source="x:1")


def test_answers_and_texts_end_at_tokens_that_exports_name(family: tuple[Processor, Callable[[str], str]]) -> None:
    processor, _ = family
    for row in (conversation(["Yes.", "No."]), Row((), source="x:1", text="Once.")):
        labels = encode(processor, row).labels
        assert int(labels[labels != IGNORE][-1]) in processor.ends.values()
    assert all(processor.tokenizer.convert_tokens_to_ids(text) == n for text, n in processor.ends.items())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("system", [None, "Be brief. "], ids=["", "system"])
def test_labels_say_what_the_assistant_says(
    family: tuple[Processor, Callable[[str], str]], kind: str, system: str | None
) -> None:
    processor, writes = family
    sample = encode(processor, conversation(ANSWERS[kind], system))
    assert spoken(processor, sample) == normalize(
        "NFC",  # as the tokenizer does
        "".join(writes(answer) + END for answer in ANSWERS[kind]),
    )


@pytest.mark.parametrize("kind", ["plain", "role markers", "tools"])
def test_what_the_user_says_is_never_learnt(family: tuple[Processor, Callable[[str], str]], kind: str) -> None:
    processor, writes = family
    row = conversation(["one", "two"], ANSWERS[kind][0], ANSWERS[kind][-1])
    assert spoken(processor, encode(processor, row)) == writes("one") + END + writes("two") + END
    assert spoken(processor, encode(processor, row, labels="last")) == writes("two") + END


def test_an_image_between_answers_has_no_label(family: tuple[Processor, Callable[[str], str]], tmp_path: Path) -> None:
    processor, writes = family
    if processor.modalities == ("text",):
        return
    images = tuple(draw(tmp_path, name, (64, 64), 0) for name in ("a", "b"))
    turns = (("user", "<image>What?"), ("assistant", "A."), ("user", "<image>And?"), ("assistant", "B. "))
    sample = encode(processor, Row(turns, images=images, root=tmp_path))
    assert spoken(processor, sample) == writes("A.") + END + writes("B. ") + END


THOUGHT = "<think>\nTwo and two.\n</think>\n\nFour."


@pytest.mark.parametrize("name", ["qwen3_vl thinking", "qwen3_omni", "qwen35_vl", "qwen3"])
def test_thinking_is_learnt_where_the_template_writes_it(name: str) -> None:
    """In the last answer as the row has it; in earlier ones the template leaves it away."""
    processor = FAMILIES[name][0]()
    sample = encode(processor, conversation([THOUGHT, THOUGHT]))
    assert spoken(processor, sample) == f"Four.{END}{THOUGHT}{END}"
    tight = encode(processor, conversation(["<think>Two.</think>Four."]))
    assert spoken(processor, tight) == f"<think>\nTwo.\n</think>\n\nFour.{END}"


def test_thinking_stands_once_where_the_template_takes_it_apart_from_the_text() -> None:
    """Qwen3.8 keeps the thinking of all turns, and writes an instruction on its effort before them."""
    processor = FAMILIES["qwen3.8"][0]()
    item = conversation([THOUGHT, "<think>Two.</think>Four.", "So:\n</think>\n\nFive.", "Six."])
    sample = encode(processor, item)
    assert spoken(processor, sample) == END.join(
        [THOUGHT, "<think>\nTwo.\n</think>\n\nFour.", "So:\n</think>\n\nFive.", "Six.", ""]
    )
    text = processor.tokenizer.decode(sample.input_ids)
    assert text.startswith(f"<|im_start|>system\n{templates.EFFORT}\n\nBe brief.")
    assert text.count("<think>") == text.count("</think>") == 4
    measured = processor.measure(item, video_fps=2.0, max_frames=8)
    assert measured is not None and measured.length == sample.length


def test_arguments_of_a_template() -> None:
    processor = FAMILIES["qwen3.8"][0]()
    item = conversation([THOUGHT, "Four."], system=None)
    processor.set_template({"reasoning_effort": "low", "preserve_thinking": False})
    sample = encode(processor, item)
    text = processor.tokenizer.decode(sample.input_ids)
    assert text.startswith("<|im_start|>system\nReasoning effort is set to low.") and text.count("<think>") == 1
    measured = processor.measure(item, video_fps=2.0, max_frames=8)
    assert measured is not None and measured.length == sample.length
    with pytest.raises(RowError, match="Unexpected reasoning effort"):
        processor.set_template({"reasoning_effort": "lwo"})
        encode(processor, item)
    for name in ("reasoning_efort", "messages", "tools", "tokenize", "add_generation_prompt"):
        with pytest.raises(ConfigError, match=f"data.template.{name}: the chat template reads no such"):
            processor.set_template({name: True})


def test_a_block_that_the_template_adds_is_not_learnt() -> None:
    processor = FAMILIES["qwen35_vl"][0]()
    sample = encode(processor, conversation(["Four.", "Five."]))
    text = processor.tokenizer.decode(sample.input_ids)
    assert text.endswith("<think>\n\n</think>\n\nFive.<|im_end|>\n") and text.count("<think>") == 1
    assert spoken(processor, sample) == f"Four.{END}Five.{END}"


def test_a_template_with_other_words_is_refused() -> None:
    processor = with_template(TimestampedProcessor.build(VISION), templates.INSTRUCT.replace("said(m.content)", "'no'"))
    with pytest.raises(RowError, match=r"x:1: the chat template writes 'no' where the row says 'Four\.'") as caught:
        encode(processor, conversation(["Four."], system=None, question="no"))
    assert caught.value.cause == "labels"


@pytest.mark.parametrize(
    ("body", "answer", "begin"),
    [
        ("ab", "ab", 0),
        ("x\n\nab", " ab ", 3),
        ("a  b", "a b", 0),
        ("b", "<t>a</t>b", 0),
        ("q a  b", "a b", 2),
        ("<think>\n\n</think>\n\nb", "<think>a</think>b", 19),
        ("<think>\nb\n</think>\n\nb", "b", 20),
        ("<think>\n\n</think>\n\n", "", 19),
    ],
)
def test_where_an_answer_begins(body: str, answer: str, begin: int) -> None:
    assert answer_begins(body, answer) == begin


@pytest.mark.parametrize(
    ("body", "text", "begin"),
    [
        ("four<call>", "four", 0),
        ("<think>\n\n</think>\n\nthink<call>", "think", 19),
        ("<think>\n\n</think>\n\nn<call>n", "n", 19),
        ("<think>\nIt is 4.\n</think>\n\n4<call>4", "<think>It is 4.</think>4", 0),
        ("<think>\n\n</think>\n\n4<call>4", "<think>It is 4.</think>4", 19),
        ("4<call>4", "<think>It is 4.</think>4", 0),
        ("<call>4", "<think>It is 4.</think>", 0),
        ("said: five<call>", "five", 6),
    ],
)
def test_where_a_text_before_calls_begins(body: str, text: str, begin: int) -> None:
    """Wherever else the text stands: within a tag, a thinking block or a call."""
    assert text_begins(body, text) == begin


def test_a_text_before_calls_that_may_stand_in_two_places_is_refused() -> None:
    with pytest.raises(ValueError, match="where the row says 'n'"):
        text_begins("analysis: n<call>n", "n")


@pytest.mark.parametrize("name", ["THINKING", "QWEN3", "QWEN35", "QWEN38"])
def test_reasoning_is_what_transformers_makes_of_reasoning_content(name: str) -> None:
    """The tokens are those of transformers' call on the same messages, whichever key the reasoning stands under."""
    processor = text_alone(getattr(templates, name))
    messages = [
        {"role": "user", "content": "q", "name": "ann"},
        {"role": "assistant", "content": "x", "reasoning_content": "\nx is it,  so\n\nx\n"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "y", "reasoning": "y, as I thought"},
    ]
    hf = [
        {("reasoning_content" if key == "reasoning" else key): value for key, value in message.items()}
        for message in messages
    ]
    wanted = processor.tokenizer.apply_chat_template(hf, tokenize=True, return_dict=True)["input_ids"]
    sample = encode(processor, make_row({"messages": messages}, "x:1", Access(Path())))
    assert sample.input_ids.tolist() == wanted
    assert spoken(processor, sample).endswith(f"x{END}<think>\ny, as I thought\n</think>\n\ny{END}")


def test_reasoning_is_written_where_the_template_knows_nothing_of_it() -> None:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x", "reasoning": "why"}]}
    processor = TimestampedProcessor.build(VISION)
    sample = encode(processor, make_row(row, "x:1", Access(Path())))
    assert spoken(processor, sample) == f"<think>\nwhy\n</think>\n\nx{END}"


def test_an_empty_answer_teaches_its_end_alone(family: tuple[Processor, Callable[[str], str]]) -> None:
    processor, writes = family
    sample = encode(processor, conversation(["", "two"]))
    assert spoken(processor, sample) == END + writes("two") + END


# ---------------------------------------------------------------- which labels


def test_all_of_the_text_but_no_medium(family: tuple[Processor, Callable[[str], str]], tmp_path: Path) -> None:
    processor, _ = family
    if processor.modalities == ("text",):
        return
    row = Row(
        (("user", "<image>What?"), ("assistant", "A.")), images=(draw(tmp_path, "a", (64, 64), 0),), root=tmp_path
    )
    sample = encode(processor, row, labels="all")
    left_out = set(sample.input_ids[sample.labels == IGNORE].tolist())
    assert left_out and left_out <= processor.media_ids


def test_a_plain_text_is_learnt_whole(family: tuple[Processor, Callable[[str], str]]) -> None:
    processor, _ = family
    sample = encode(processor, Row((), text="Once upon a time.", kind="text", weight=0.5))
    ids = processor.tokenizer("Once upon a time.")["input_ids"]
    assert sample.input_ids.tolist() == [*ids, processor.tokenizer.eos_token_id]
    torch.testing.assert_close(sample.labels, sample.input_ids, rtol=0, atol=0)
    assert sample.weights is not None and sample.weights.tolist() == [0.5] * sample.length
    with pytest.raises(RowError, match=r"text contains '<\|im_end\|>'"):
        encode(processor, Row((), text="a <|im_end|>"))


# ---------------------------------------------------------------- weights


def test_weights_of_row_and_messages(family: tuple[Processor, Callable[[str], str]]) -> None:
    processor, writes = family
    turns = (("user", "And?"), ("assistant", "one"), ("user", "And?"), ("assistant", "two"))
    row = Row(turns, weight=0.5, weights=(1.0, 4.0, 1.0, 0.0))
    sample = encode(processor, row)
    assert spoken(processor, sample) == writes("one") + END
    assert sample.weights is not None
    assert set(sample.weights.tolist()) == {0.0, 2.0}
    torch.testing.assert_close(sample.weights > 0, sample.labels != IGNORE, rtol=0, atol=0)
    assert sample.label_weight == 2.0 * sample.num_labels
    plain = encode(processor, Row(turns))
    assert plain.weights is None and plain.label_weight == plain.num_labels
    silent = encode(processor, Row(turns, weight=0.0))
    assert silent.num_labels == 0 and silent.label_weight == 0.0
