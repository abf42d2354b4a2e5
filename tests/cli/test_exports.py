"""What a run leaves works in transformers as it worked in training: it stops, and it reads rows as the run did."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import Zoo, write_rows
from support.tiny_qwen3 import write_tiny_qwen3
from support.tiny_qwen3_vl import write_tiny_qwen3_vl

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"


def text_base(folder: Path) -> Path:
    """Weights of a base model: generation_config.json names the end of a text alone."""
    from transformers import AutoTokenizer

    write_tiny_qwen3(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = END_OF_TEXT
    tokenizer.save_pretrained(folder)
    settings = {"eos_token_id": tokenizer.eos_token_id, "top_p": 0.8}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_tuned_base_model_stops(zoo: Zoo, tmp_path: Path, lora: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights, run, merged = text_base(tmp_path / "base"), tmp_path / "run", tmp_path / "merged"
    turns = [("What colour?", "red"), ("And the sky?", "blue")]
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in turns * 4]
    keys = ["lora.rank=4", "train.lr=2e-2"] if lora else ["train.lr=3e-3"]
    done = zoo(
        "train", f"recipe=qwen3_{'lora' if lora else 'sft'}", f"model.init={weights}", "nproc=1", f"run.dir={run}",
        f"data.train={write_rows(tmp_path / 'rows.jsonl', rows)}", "train.steps=16", "train.warmup_steps=1",
        "train.global_batch=2", "packing.budget=64", "engine.precision=fp32", *keys,
    )  # fmt: skip
    assert done.code == 0, done
    done = zoo("convert", str(run), str(merged))
    assert done.code == 0, done
    for folder in [merged] if lora else [merged, run / "export"]:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text, turn = (tokenizer.convert_tokens_to_ids(token) for token in (END_OF_TEXT, END_OF_TURN))
        settings = json.loads((folder / "generation_config.json").read_text())
        assert settings == {"eos_token_id": [text, turn], "top_p": 0.8}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        asked: Any = tokenizer.apply_chat_template(
            rows[0]["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer = model.generate(**asked, max_new_tokens=12, do_sample=False)[0, asked["input_ids"].shape[1] :]
        assert tokenizer.decode(answer) == f"red{END_OF_TURN}"
    card = (run / "export" / "README.md").read_text()
    assert "answers end at" in card and (f"eos_token_id=[{turn}, {text}]" in card) == lora


def seen(folder: Path) -> Path:
    """Rows whose answer hangs on how images are read: a few pixels of each, or all of them."""
    from PIL import Image

    rng = torch.Generator().manual_seed(0)
    rows = []
    for number in range(8):
        pixels = torch.randint(0, 256, (96, 128, 3), dtype=torch.uint8, generator=rng)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
        turns = [{"role": "user", "content": "<image>which?"}, {"role": "assistant", "content": f"it is {number}"}]
        rows.append({"chat": turns, "pictures": [f"{number}.png"]})
    import datasets

    datasets.Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


def evaluated(zoo: Zoo, *argv: str) -> tuple[dict[str, Any], str]:
    done = zoo("eval", *argv, "--json", "max_new_tokens=2")
    assert done.code == 0, done
    return json.loads(done.out), done.err


def test_rows_are_read_as_the_run_read_them(zoo: Zoo, tmp_path: Path) -> None:
    weights, rows, run = write_tiny_qwen3_vl(tmp_path / "weights"), seen(tmp_path), tmp_path / "run"
    entry = f"{{path: {rows}, columns: {{messages: chat, images: pictures}}, held_out: 0.4}}"
    done = zoo(
        "train", "recipe=qwen3_vl_sft", f"model.init={weights}", "nproc=1", f"run.dir={run}", f"data.train={entry}",
        "data.max_pixels=4096", "data.labels=all", "train.steps=2", "train.warmup_steps=0", "train.global_batch=2",
        "packing.budget=256", "engine.precision=fp32",
    )  # fmt: skip
    assert done.code == 0, done
    wanted = json.loads((run / "summary.json").read_text())["metrics"]
    found, said = evaluated(zoo, str(run))
    assert (found["rows"], found["loss"]) == (wanted["rows"], pytest.approx(wanted["loss"], rel=1e-5))
    assert "data.max_pixels=4096" in said and "data.labels=all" in said and "evaluated on: 0.4 of " in said
    named = f"{{path: {rows}, held_out: 0.4}}"
    for source in (run, run / "export", *(run / "checkpoints").glob("iter_*")):
        found, said = evaluated(zoo, str(source), named)
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5), source
        assert "data.max_pixels=4096" in said and "columns=" in said
    other, said = evaluated(zoo, str(run), named, "data.max_pixels=null")
    assert abs(other["loss"] - wanted["loss"]) > 1e-3 and "max_pixels" not in said


def test_transformers_scores_an_export_as_the_run_did(zoo: Zoo, tmp_path: Path) -> None:
    """By the export's own processor and model, with no argument that says how media are read."""
    import av
    import numpy as np
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from transformers.video_utils import VideoMetadata

    weights, run = write_tiny_qwen3_vl(tmp_path / "weights"), tmp_path / "run"
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (96, 160, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    frames = rng.integers(0, 255, (8, 64, 96, 3), dtype=np.uint8)
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264rgb", rate=4, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = 96, 64, "rgb24"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    rows = []
    for kind, name, answer in (("image", "a.png", "grey noise"), ("video", "a.mp4", "more of it")):
        turns = [{"role": "user", "content": f"<{kind}>what?"}, {"role": "assistant", "content": answer}]
        rows.append({"messages": turns, f"{kind}s": [name]})
    file = write_rows(tmp_path / "rows.jsonl", rows)
    done = zoo(
        "train", "recipe=qwen3_vl_sft", f"model.init={weights}", "nproc=1", f"run.dir={run}", f"data.train={file}", f"data.eval={file}",
        "data.max_pixels=4096", "data.video_max_pixels=16384", "data.video_fps=4", "train.steps=2", "train.warmup_steps=0",
        "train.global_batch=1", "packing.budget=256", "engine.precision=fp32", "log.predictions=0",
    )  # fmt: skip
    assert done.code == 0, done
    processor = AutoProcessor.from_pretrained(run / "export")
    model = AutoModelForImageTextToText.from_pretrained(run / "export", dtype=torch.float32).eval()
    total = count = 0
    for row, kind in zip(rows, ("image", "video"), strict=True):
        question, answer = ({"type": "text", "text": turn["content"]} for turn in row["messages"])
        question["text"] = "what?"
        chat = [{"role": "user", "content": [{"type": kind}, question]}, {"role": "assistant", "content": [answer]}]
        text = processor.apply_chat_template(chat, tokenize=False)
        if kind == "image":
            media: dict[str, Any] = {"images": [Image.open(tmp_path / "a.png")]}
        else:
            clock = VideoMetadata(total_num_frames=8, fps=4.0, duration=2.0)
            media = {"videos": [torch.from_numpy(frames).permute(0, 3, 1, 2)], "video_metadata": [clock]}
        inputs = processor(text=[text], return_tensors="pt", **media)
        ids = inputs["input_ids"][0]
        said = processor.tokenizer(f"{answer['text']}{END_OF_TURN}\n")["input_ids"]
        assert ids[-len(said) :].tolist() == said
        with torch.no_grad():
            scores = model(**inputs).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        total -= float(scores[-len(said) : -1].sum())
        count += len(said) - 1
    wanted = json.loads((run / "summary.json").read_text())["metrics"]["loss"]
    assert total / count == pytest.approx(wanted, rel=1e-5)


def test_adapters_are_written_as_vllm_loads_them(zoo: Zoo, tmp_path: Path) -> None:
    """A run's: peft's format as the run has exported it, vLLM's of its experts one by one; lora.init takes either."""
    from safetensors.torch import load_file

    weights, run, served = write_tiny_qwen3(tmp_path / "base", moe=True), tmp_path / "run", tmp_path / "served"
    rows = [{"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "red"}]}] * 4
    common = (
        "recipe=qwen3_moe_lora", f"model.init={weights}", f"data.train={write_rows(tmp_path / 'rows.jsonl', rows)}", "nproc=1",
        "train.warmup_steps=0", "train.global_batch=2", "packing.budget=64", "engine.precision=fp32", "lora.rank=4",
        "lora.targets=[q_proj,experts.down_proj]", "lora.dropout=0", "train.lr=2e-2",
    )  # fmt: skip
    done = zoo("train", *common, "train.steps=2", f"run.dir={run}")
    assert done.code == 0 and f"to serve it: zoo convert {run} FOLDER adapter_format=vllm" in done.out, done
    exported = load_file(run / "export" / "adapter_model.safetensors")
    assert zoo("convert", str(run), str(tmp_path / "peft"), "adapter_format=peft").code == 0
    assert zoo("convert", str(run), str(served), "adapter_format=vllm", "dtype=bf16").code == 0
    again = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert again.keys() == exported.keys()
    for name, tensor in again.items():
        torch.testing.assert_close(tensor, exported[name], rtol=0, atol=0)
    for name in ("adapter_config.json", "README.md"):
        assert (tmp_path / "peft" / name).read_text() == (run / "export" / name).read_text()
    tensors = load_file(served / "adapter_model.safetensors")
    experts = [name for name in tensors if ".experts." in name]
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert len(experts) % 6 == 0 and all(
        ".experts.0." not in name or tensors[name].any() for name in experts if "down_proj" in name
    )
    assert not any(tensors[name].any() for name in experts if "gate_proj" in name or "up_proj" in name)
    done = zoo(
        "train",
        *common,
        "train.steps=1",
        "train.lr=1e-30",
        "train.min_lr=0",
        f"lora.init={served}",
        f"run.dir={tmp_path / 'on'}",
    )
    assert done.code == 0, done
    for name, tensor in load_file(tmp_path / "on" / "export" / "adapter_model.safetensors").items():
        torch.testing.assert_close(tensor, exported[name].bfloat16().float(), rtol=0, atol=1e-20)
    assert (
        zoo.refused("convert", str(run), "x", "adapter_format=gguf") == "adapter_format=gguf: wanted one of peft, vllm"
    )
    assert zoo.refused("convert", str(weights), "x", "adapter_format=vllm").endswith(
        "is no run with adapters; leave it out"
    )


def test_what_servers_dont_load_of_an_adapter_is_named(zoo: Zoo, tmp_path: Path) -> None:
    weights, run = write_tiny_qwen3_vl(tmp_path / "weights"), tmp_path / "run"
    rows = [{"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "red"}]}] * 4
    done = zoo(
        "train", "recipe=qwen3_vl_lora", f"model.init={weights}", "nproc=1", f"run.dir={run}", "train.steps=1", "train.warmup_steps=0",
        f"data.train={write_rows(tmp_path / 'rows.jsonl', rows)}", "train.global_batch=2", "packing.budget=64", "engine.precision=fp32",
        "lora.rank=2", "lora.parts=[vision,language]", "lora.whole_parts=[merger]",
    )  # fmt: skip
    assert done.code == 0, done
    unserved = "vLLM and SGLang do not load adapters in vision, merger (trained whole)"
    assert unserved in done.out and unserved in (run / "export" / "README.md").read_text()
    assert zoo.refused("convert", str(run), "x", "adapter_format=vllm").startswith(f"adapter_format=vllm: {unserved}")
    done = zoo("convert", str(run), str(tmp_path / "peft"), "adapter_format=peft")
    assert done.code == 0 and unserved in done.err
    names = ("adapter_config.json", "adapter_model.safetensors", "README.md")
    assert all((tmp_path / "peft" / name).read_bytes() == (run / "export" / name).read_bytes() for name in names)
