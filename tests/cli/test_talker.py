"""A run of the talker: its loss falls, it resumes, and transformers speaks from its export, whose thinker and codec are what they were."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from support.commands import Zoo, write_rows
from support.tiny import load_plain
from support.tiny_talker import CODES, write_tiny_talker
from support.weights import same, tensors

from zoo import speak
from zoo.data.errors import RowError

STEPS = 12
SAID = {"Say 1.": "1 2", "Say 2.": "3 4 5"}


def spoken_rows(folder: Path) -> Path:
    """Two answers, each spoken its own way by its own speaker; one of them in an npy file."""
    rows: list[dict[str, Any]] = []
    for number, (question, answer) in enumerate(SAID.items()):
        codes = np.random.default_rng(number).integers(0, CODES, (9, 4))
        np.save(folder / f"{number}.npy", codes)
        speech = f"{number}.npy" if number else codes.tolist()
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages, "speech": speech, "speaker": ("ethan", "chelsie")[number]})
    return write_rows(folder / "rows.jsonl", rows * 4)


def log(run: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (run / "train.jsonl").read_text().splitlines())
    return [record for record in records if "code_loss" in record]


def test_a_talker_learns_and_speaks_in_transformers(zoo: Zoo, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    weights, run = write_tiny_talker(tmp_path / "weights"), tmp_path / "run"
    command = (
        "train", "recipe=qwen3_omni_talker_sft", f"model.init={weights}", "nproc=1", f"run.dir={run}",
        f"data.train={spoken_rows(tmp_path)}", f"train.steps={STEPS}", f"train.save_every={STEPS // 2}", "train.lr=1e-2",
        "train.warmup_steps=0", "train.global_batch=2", "packing.budget=128", "engine.precision=fp32", "data.shuffle=false",
    )  # fmt: skip
    done = zoo(*command)
    assert done.code == 0, done
    assert "86 tensors are not trained" in done.err + done.out
    first = log(run)
    for key in ("loss", "code_loss", "residual_loss"):
        assert first[-1][key] < 0.7 * first[0][key]
    assert (
        abs(first[0]["loss"] - first[0]["code_loss"] - 0.3 * first[0]["residual_loss"] * 18 / 20) < 1e-5
    )  # 9 frames and an end
    exported = tensors(run / "export")

    shutil.rmtree(run / "checkpoints" / f"iter_{STEPS}")
    shutil.rmtree(run / "export")
    done = zoo(*command)
    assert done.code == 0 and f"iter_{STEPS // 2}" in done.out, done
    again = log(run)[-STEPS // 2 :]
    assert [step["loss"] for step in again] == [step["loss"] for step in first[STEPS // 2 :]]
    found, before = tensors(run / "export"), tensors(weights)
    assert all(found[name].equal(tensor) for name, tensor in exported.items()) and found.keys() == exported.keys()

    done = zoo("convert", str(run), str(tmp_path / "converted"))
    assert done.code == 0, done
    converted = tensors(tmp_path / "converted")
    assert converted.keys() == found.keys() and all(converted[name].equal(tensor) for name, tensor in found.items())
    kept = {name for name in found if not name.startswith("talker.")}
    assert all(found[name].equal(before[name]) for name in kept if name in before) and len(kept) > 200

    for source, target in ((weights, "native"), (tmp_path / "native", "back")):  # in zoo's own names, and out of them
        done = zoo("convert", str(source), str(tmp_path / target))
        assert done.code == 0, done
    same(tensors(tmp_path / "back"), before)

    out = tmp_path / "own"
    done = zoo(
        "speak", str(run), str(tmp_path / "rows.jsonl"), f"out={out}", "answers=rows", "max_rows=2", "talker_temperature=0",
        "talker_max_new_tokens=12", "nproc=1",
    )  # fmt: skip
    assert done.code == 0, done
    model = load_plain(run / "export")
    written = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    cut = done.err.count("its speech is cut after 11 frames (talker_max_new_tokens)")
    assert f"{len(written)} of 2 rows spoken in {out}" in done.out and cut == 2 - len(written)
    for number, (question, answer) in enumerate(SAID.items()):
        codes = np.load(out / f"speech/{number:06d}.npy")
        assert codes.dtype == np.int32 and codes.shape[1:] == (4,) and 1 <= len(codes) <= 11
        with torch.no_grad():
            wanted = model.code2wav.chunked_decode(torch.from_numpy(codes).long().T[None])[0, 0]
        sound, rate = soundfile.read(out / f"audio/{number:06d}.wav")
        assert rate == round(12.5 * model.code2wav.total_upsample) and np.abs(sound - wanted.numpy()).max() < 1e-4
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        row = {"messages": messages, "speech": f"speech/{number:06d}.npy", "speaker": ("ethan", "chelsie")[number]}
        assert (row in written) == (len(codes) < 11)

    asked_rows = [{"messages": [{"role": "user", "content": question}]} for question in SAID]
    for answers, lacking in (("model", False), ("rows", True)):
        options: dict[str, Any] = {"answers": answers, "audio": False, "max_new_tokens": 4, "talker_max_new_tokens": 4}
        options |= {"speaker": "ethan", "out": tmp_path / answers, "in_process": True}
        with pytest.raises(RowError, match="has no answer of its own") if lacking else nullcontext():
            results = speak(run, asked_rows, ["hardware=cpu"], **options)
    assert len(results) == 2 and all("speech" in row or "unspoken" in row for row in results)

    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    asked: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say 1."}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer, sound = model.generate(
        **asked, speaker="Ethan", return_audio=True, thinker_max_new_tokens=4, talker_max_new_tokens=9
    )
    assert answer.shape[1] > asked["input_ids"].shape[1] and sound.ndim == 3 and bool(sound.isfinite().all())
