"""Files in the forms of LLaMA-Factory's and ms-swift's demonstrations are read as they are, up to the sample.

The forms are those that both projects document and publish; what the rows say is made up here.
"""

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from PIL import Image

from zoo.config.schema import DataConfig
from zoo.data.loading.sample_source import SampleSource
from zoo.data.processors.processor import Processor
from zoo.data.sample import IGNORE


def talk(question: str, answer: str) -> list[dict[str, str]]:
    return [{"content": question, "role": "user"}, {"content": answer, "role": "assistant"}]


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": said} for role, said in pairs]


ADD = {
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
}
CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
# File -> its rows and the answers that are learnt. A name that ends in .json is one list, .jsonl a row a line.
FACTORY: dict[str, tuple[list[Any], list[str]]] = {
    "alpaca_en_demo.json": ([{"instruction": "Name a colour.", "input": "", "output": "Red."}, {"instruction": "Add.", "input": "1 2", "output": "3"}], ["Red.", "3"]),
    "identity.json": ([{"instruction": "hi", "input": "", "output": "I am {{name}}, made by {{author}}."}], ["I am {{name}}, made by {{author}}."]),
    "mllm_demo.json": ([{"messages": talk("<image>What?", "A ball.") + talk("Which colour?", "Red."), "images": ["mllm_demo_data/1.jpg"]}], ["A ball.", "Red."]),
    "mllm_audio_demo.json": ([{"messages": talk("<audio>What is said?", "Hello."), "audios": ["mllm_demo_data/1.wav"]}], ["Hello."]),
    "mllm_video_demo.json": ([{"messages": talk("<video>What happens?", "Noise."), "videos": ["mllm_demo_data/1.mp4"]}], ["Noise."]),
    "mllm_video_audio_demo.json": ([{"messages": talk("<video><audio>What happens?", "Both."), "videos": ["mllm_demo_data/1.mp4"], "audios": ["mllm_demo_data/1.wav"]}], ["Both."]),
    "glaive_toolcall_en_demo.json": ([{"conversations": turns(("human", "1 + 2?"), ("function_call", CALL), ("observation", '{"sum": 3}'), ("gpt", "3.")), "tools": json.dumps([ADD])}, {"conversations": turns(("human", "Hi."), ("gpt", "Hello.")), "tools": "[]"}], [CALL, "3.", "Hello."]),
    "dpo_en_demo.json": ([{"conversations": turns(("human", "Which?")), "chosen": {"from": "gpt", "value": "This."}, "rejected": {"from": "gpt", "value": "That."}}], ["This."]),
    "c4_demo.jsonl": ([{"text": "Once upon a time."}], ["Once upon a time."]),
}  # fmt: skip
SWIFT: dict[str, tuple[list[Any], list[str]]] = {
    "messages.jsonl": ([{"messages": [{"role": "system", "content": "Be brief."}, *talk("q", "a"), *talk("r", "b")]}], ["a", "b"]),
    "query.jsonl": ([{"system": "Be brief.", "query": "q2", "response": "a2", "history": [["q1", "a1"]]}, {"query": "q", "response": "a"}], ["a1", "a2", "a"]),
    "alpaca.jsonl": ([{"system": "Be brief.", "instruction": "i", "input": "j", "output": "o"}], ["o"]),
    "sharegpt.jsonl": ([{"system": "Be brief.", "conversation": [{"human": "q", "assistant": "a"}, {"human": "r", "assistant": "b"}]}], ["a", "b"]),
    "images.jsonl": ([{"messages": talk("<image>What?", "A."), "images": ["mllm_demo_data/1.jpg"]}, {"messages": talk("<image><image>Same?", "Yes."), "images": ["mllm_demo_data/1.jpg"] * 2}], ["A.", "Yes."]),
    "omni.jsonl": ([{"messages": talk("<audio>and <image> and <video>?", "All."), "audios": ["mllm_demo_data/1.wav"], "images": ["mllm_demo_data/1.jpg"], "videos": ["mllm_demo_data/1.mp4"]}], ["All."]),
    "grounding.jsonl": ([{"messages": talk("<image>Find the <ref-object>", "<bbox><bbox>"), "images": ["mllm_demo_data/1.jpg"], "objects": {"ref": ["sheep"], "bbox": [[16, 8, 32, 32], [0, 0, 64, 32]]}}], ["[250, 250, 500, 1000][0, 0, 1000, 1000]"]),
    "agent.jsonl": ([{"tools": json.dumps([{"type": "function", "function": ADD}]), "messages": [{"role": "user", "content": "1 + 2?"}, {"role": "tool_call", "content": CALL}, {"role": "tool_response", "content": '{"sum": 3}'}, {"role": "assistant", "content": "3."}]}], [CALL, "3."]),
    "rlhf.jsonl": ([{"messages": talk("q", "a"), "rejected_response": "b"}], ["a"]),
    "loss.jsonl": ([{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "loss": False}, {"role": "user", "content": "r"}, {"role": "assistant", "content": "b", "loss": True}]}], ["b"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    media = folder / "mllm_demo_data"
    media.mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (32, 64, 3), np.uint8)
    Image.fromarray(noise).save(media / "1.jpg")
    soundfile.write(media / "1.wav", 0.1 * np.sin(np.arange(16_000) / 9), 16_000)
    with av.open(str(media / "1.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=2)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        for _ in range(4):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(noise, format="rgb24")))
        container.mux(stream.encode(None))
    return folder


def write(path: Path, rows: list[Any]) -> str:
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    path.write_text(json.dumps(rows, indent=2) if path.suffix == ".json" else lines)
    return str(path)


@pytest.mark.parametrize("name", [*FACTORY, *SWIFT])
def test_a_demonstration_is_read_as_it_is(name: str, folder: Path, processor: Processor) -> None:
    rows, answers = {**FACTORY, **SWIFT}[name]
    source = SampleSource.open([write(folder / name, rows)], processor, DataConfig(), budget=4096)
    samples = [source.sample(number) for number in range(len(source))]
    learnt = ""
    for number, sample in enumerate(samples):
        assert sample is not None
        size = source.measure(number)
        assert size is None or size.length == sample.length
        learnt += processor.tokenizer.decode(sample.labels[sample.labels != IGNORE])
    said = learnt.replace("<tool_call>", "").replace("</tool_call>", "")
    assert [one for one in said.split("<|im_end|>") if one.replace("<|endoftext|>", "").strip()] == answers
