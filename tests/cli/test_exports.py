"""What a run leaves works in transformers as it worked in training: it stops, and it reads rows as the run did."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import Zoo, write_rows
from support.tiny_qwen3 import write_tiny_qwen3

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


@pytest.mark.parametrize("lora", [True, False])
def test_a_tuned_base_model_stops(zoo: Zoo, tmp_path: Path, lora: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights, run, merged = text_base(tmp_path / "base"), tmp_path / "run", tmp_path / "merged"
    turns = [("What colour?", "red"), ("And the sky?", "blue")]
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in turns * 4
    ]
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
