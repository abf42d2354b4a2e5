"""A run of the talker with one codebook: its loss falls, it resumes, and transformers speaks from its export with the speakers it came with."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from support.commands import Zoo, write_rows
from support.tiny import load_plain
from support.tiny_qwen25_talker import CODES, write_tiny_qwen25_talker
from support.weights import same, tensors

STEPS = 12
SAID = {"Say 1.": ("1 2", "Ethan"), "Say 2.": ("3 4 5", "chelsie")}


def spoken_rows(folder: Path) -> Path:
    """Two answers, each spoken its own way by its own speaker."""
    rows: list[dict[str, Any]] = []
    for number, (question, (answer, speaker)) in enumerate(SAID.items()):
        codes = torch.randint(0, CODES, (9,), generator=torch.Generator().manual_seed(number)).tolist()
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages, "speech": codes, "speaker": speaker})
    return write_rows(folder / "rows.jsonl", rows * 4)


def log(run: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (run / "train.jsonl").read_text().splitlines())
    return [record for record in records if "code_loss" in record]


def speaks(zoo: Zoo, run: Path, folder: Path) -> None:
    """The run's checkpoint says the rows, to sound of the checkpoint that it started from."""
    out = folder / "own"
    done = zoo(
        "speak", str(run), str(folder / "rows.jsonl"), f"out={out}", "answers=rows", "max_rows=2", "talker_temperature=0",
        "talker_max_new_tokens=12", "seed=3", "nproc=1",
    )  # fmt: skip
    assert done.code == 0 and "Warning" not in done.err and "[transformers]" not in done.err, done
    written = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert f"{len(written)} of 2 rows spoken in {out}" in done.out
    model = load_plain(folder / "weights")
    for number, (_, speaker) in enumerate(SAID.values()):
        codes = np.load(out / f"speech/{number:06d}.npy")
        assert codes.dtype == np.int32 and codes.shape[1:] == (1,) and 1 <= len(codes) <= 12
        voice = model.speaker_map[speaker.title()]
        torch.manual_seed(3_000_009 + number)
        with torch.no_grad():
            wanted = model.token2wav(
                torch.from_numpy(codes).long().T, conditioning=voice["cond"], reference_mel=voice["ref_mel"]
            )
        sound, rate = soundfile.read(out / f"audio/{number:06d}.wav")
        assert rate == 50 * 8 and np.abs(sound - wanted.clip(-1, 1).numpy()).max() < 1e-4
    assert any(row["speech"] == f"speech/{number:06d}.npy" for number, row in enumerate(written))


def test_a_talker_of_one_codebook_learns_and_speaks_in_transformers(zoo: Zoo, tmp_path: Path) -> None:
    weights, run = write_tiny_qwen25_talker(tmp_path / "weights"), tmp_path / "run"
    command = (
        "train", "recipe=qwen25_omni_talker_sft", f"model.init={weights}", "nproc=1", f"run.dir={run}",
        f"data.train={spoken_rows(tmp_path)}", f"train.steps={STEPS}", f"train.save_every={STEPS // 2}", "train.lr=1e-2",
        "train.warmup_steps=0", "train.global_batch=2", "packing.budget=128", "engine.precision=fp32", "data.shuffle=false",
    )  # fmt: skip
    done = zoo(*command)
    assert done.code == 0, done
    assert "go into exports as they are: token2wav.*" in done.err + done.out
    assert "Warning" not in done.err and "[transformers]" not in done.err, done.err
    first = log(run)
    assert first[-1]["loss"] == first[-1]["code_loss"] < 0.7 * first[0]["code_loss"]
    assert "residual_loss" not in first[0]
    exported = tensors(run / "export")

    shutil.rmtree(run / "checkpoints" / f"iter_{STEPS}")
    shutil.rmtree(run / "export")
    done = zoo(*command)
    assert done.code == 0 and f"iter_{STEPS // 2}" in done.out, done
    assert [step["loss"] for step in log(run)[-STEPS // 2 :]] == [step["loss"] for step in first[STEPS // 2 :]]
    found, before = tensors(run / "export"), tensors(weights)
    same(found, exported)
    kept = {name for name in found if not name.startswith("talker.")}
    assert all(found[name].equal(before[name]) for name in kept) and len(kept) > 200
    assert any(not found[name].equal(before[name]) for name in found.keys() - kept) and found.keys() == before.keys()

    for source, target in ((weights, "native"), (tmp_path / "native", "back")):  # in zoo's own names, and out of them
        done = zoo("convert", str(source), str(tmp_path / target))
        assert done.code == 0, done
    same(tensors(tmp_path / "back"), before)
    for folder in (run / "export", tmp_path / "back"):
        assert (folder / "spk_dict.pt").read_bytes() == (weights / "spk_dict.pt").read_bytes()

    speaks(zoo, run, tmp_path)
    model = load_plain(run / "export")
    said = model.config.talker_config
    ends = [said.tts_codec_pad_token_id, said.tts_codec_end_token_id]
    asked = torch.tensor([[368, 266, 10, 20, 369, 10, 368, 271, 10]])
    answer, sound = model.generate(
        asked, attention_mask=torch.ones_like(asked), speaker="Ethan", thinker_max_new_tokens=4, talker_max_new_tokens=9,
        talker_eos_token_id=ends, token2wav_num_steps=2,
    )  # fmt: skip
    assert answer.shape[1] > asked.shape[1] and sound.ndim == 1 and len(sound) and bool(sound.isfinite().all())
