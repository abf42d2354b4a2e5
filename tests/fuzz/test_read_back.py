"""Files that zoo wrote and reads back, damaged or exchanged: each is read, or refused in one sentence, soon."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import NUMBERS, fuzzed, mutated, within

from zoo.bridge import native
from zoo.bridge.files import record
from zoo.bridge.mapping.peft import check_config
from zoo.bridge.mapping.peft_targets import Sizes
from zoo.checkpoint import integrity, selection
from zoo.checkpoint.progress import saving
from zoo.checkpoint.storage.index import Index
from zoo.config.locate import Place, check_side_files, checkpoints, read_origin, read_state, step_of
from zoo.config.schema import DataConfig, DistillConfig, TrainConfig
from zoo.data.loading.bad_rows import BadRows
from zoo.errors import UserError, file_error
from zoo.files import read_object
from zoo.logging.result import TrainResult, losses_by_step, was_completed
from zoo.logging.run_log import RunLog, has_ended
from zoo.model import run_settings
from zoo.tools.inspection.replay import Step, table
from zoo.tools.runs.history import read_run
from zoo.tools.runs.page import page
from zoo.tools.runs.status import describe, find_runs, read_status
from zoo.tools.runs.status import table as table_of_runs
from zoo.training.bad_steps.detector import BadStepDetector
from zoo.training.distillation.token_files import RowTokens, TokenReader, TokenWriter
from zoo.watchdog.run_lock import refuse_second

MEMORY_MB = 512
STEP = {
    "step": 1, "loss": 6.1, "grad_norm": 7.8, "lr": 3e-5, "real_tokens": 2048, "pad_fraction": 0.0, "labels": 378, "step_ms": 1768.7,
    "data_ms": 1.0, "data_wait": 0.75, "time": 1795875866.1,
}  # fmt: skip
EVAL = {
    "event": "eval", "step": 1, "loss": 5.1, "exact_match": 0.5, "rows": 2, "data": ["digits:heldout"], "time": 1795875867.0,
    "by_kind": {"image": {"exact_match": 0.0, "rows": 1, "loss": 4.9}},
}  # fmt: skip
LOG: list[dict[str, Any]] = [
    {"event": "start", "step": 0, "total_steps": 6, "ranks": 2, "time": 1795875864.4},
    STEP, EVAL, {**STEP, "step": 2, "loss": None}, {"event": "skip", "step": 2, "cause": "loss", "time": 1795875868.0},
    {"event": "slow_step", "step": 2, "cause": "data"}, {"event": "rows_left_out", "step": 2, "counts": {"overlong": 2}},
    {"event": "save", "step": 2, "bytes": 10, "write_ms": 3.0}, {**STEP, "step": 3, "time": 1795875869.0},
    {"event": "end", "step": 3, "reason": "finished", "time": 1795875872.8},
]  # fmt: skip
RANK = {
    "rank": 0, "state": "works", "step": 3, "phase": "step", "phase_seconds": 1.0, "silent_seconds": 0.1, "stuck_seconds": 0.2, "place": "x.py:3",
    "waits_in": "", "machine": "m",
}  # fmt: skip
STATE = {
    "step": 3, "total_steps": 6, "ranks": 2, "updates": 3, "train_steps": 6, "data": {"step": 3, "rows": 20, "waiting": [], "corrected": [[1, 2, 3]]},
    "model": {"family": "qwen3_vl", "arch": {"hidden_size": 64}}, "scheduler": {"num_steps": 3},
    "weights": {"init": "random", "mtp_loss": 0.0, "fp32": ["a.*"], "lora": {"rank": 4, "alpha": 8.0, "targets": ["x"], "parts": ["language"]}},
    "bad_steps": {"counts": {"loss": 1}, "in_a_row": 0, "spikes": [], "step": 3, "bad_at": [2], "level_at": None, "good": 2, "window": [6.1]},
    "callbacks": {},
}  # fmt: skip
SUMMARY = {
    "steps": 3, "total_steps": 6, "interrupted": False, "stopped": None, "checkpoint": "run/checkpoints/iter_3", "seconds": 7.0,
    "skipped_rows": {}, "memory": {"host_gib": 1.07, "peak_gib": None}, "metrics": {"loss": 5.1, "by_kind": {"image": {"loss": 4.9}}},
}  # fmt: skip
INDEX = {
    "format": "zoo sharded tensors", "version": 1, "files": [[["rank0_0.bin", 4096]]], "objects": {"o": [0, 0, 8]},
    "tensors": {"a": {"dtype": "float32", "shape": [4, 4], "pieces": [[0, 0, [0, 0], [4, 4]]]}},
}  # fmt: skip
BAD_STEP = {
    "step": 2, "loss": None, "grad_norm": None, "cause": "loss", "why": "its loss is nan", "data": {"waiting": []},
    "rows": [{"rank": 0, "micro_batch": 0, "loss": 1.0, "tokens": 9, "labels": 3, "samples": [{"source": "a:1", "kind": "text", "tokens": 9}]}],
}  # fmt: skip
ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "modules_to_save": None, "bias": "none"}
SETTINGS = {"rows": {"format": "messages"}, "settings": {"data.labels": "assistant", "packing.budget": 64}}
ABOUT = {
    "format": 2, "family": "qwen3_vl", "dtypes": {"a": "F32"}, "allow": [], "allowed": ["b"], "source": "c", "layouts": {"a": "d"}, "changed": {},
}  # fmt: skip
CONFIG = "# The resolved recipe of a run of zoo\nrecipe: x\nmodel: {family: qwen3_vl, init: random}\ndata: {train: ['digits:train']}\ntrain: {lr: 0.1}\n"


def all_of_run(run: Path) -> None:
    """What `zoo show`, `list`, `report`, and a Python user's TrainResult read."""
    status = read_status(run)
    describe(status)
    json.dumps(status.to_json())
    table_of_runs(find_runs(run.parent))
    page([read_run(run)])
    losses_by_step(run)
    selection.best_of(run, "exact_match")
    TrainResult.from_run_dir(run)


def resumed(run: Path) -> None:
    """What a start of `zoo train` reads, before it trains."""
    refuse_second(run)
    was_completed(run, 6, True)
    has_ended(run)
    selection.best_of(run, "loss")
    log = object.__new__(RunLog)
    log.folder = run
    log._forget_after(2)
    BadRows(DataConfig(), run / "bad_rows.jsonl")


def locked(run: Path) -> None:
    all_of_run(run)
    resumed(run)


def state(run: Path) -> None:
    checkpoint = run / "checkpoints" / "iter_3"
    checkpoints(run), step_of(checkpoint)
    tuple(read_origin(checkpoint).get("fp32", ()))
    BadStepDetector(TrainConfig()).load_state_dict(read_state(checkpoint).get("bad_steps", {}))


def sums(run: Path) -> None:
    checkpoint = run / "checkpoints" / "iter_3"
    for fault in integrity.faults(checkpoint):
        one_sentence(fault)
    integrity.strangers(checkpoint)
    integrity.block_checksums(checkpoint)


def config(run: Path) -> None:
    all_of_run(run)
    checkpoint = run / "checkpoints" / "iter_3"
    run_settings.settings_of(Place("run", checkpoint, checkpoint / "hf"))


def tokens(run: Path) -> None:
    folder = run / "teacher"
    given = {"top_k": 2, "temperature": 1.0, "vocabulary": 50, "model": "m", "data": "d", "rows": 1}
    try:
        TokenWriter(folder, given)
    finally:
        TokenReader(str(folder), DistillConfig(top_k=2), 50)


def converted(run: Path) -> None:
    (native.read_about(run / "native"), native.read_layouts(run / "native"), native.published_dtypes(run / "native"))


def exported(run: Path) -> None:
    folder = run / "export"
    record.foreign(folder)
    run_settings.settings_of(Place("hf", folder, folder))
    check_side_files(folder)


FILES: dict[str, tuple[Callable[[Path], object], Any]] = {
    "train.jsonl": (all_of_run, LOG),
    "predictions.jsonl": (resumed, [{"step": 1, "source": "a"}, {"step": 3}]),
    "bad_rows.jsonl": (resumed, [{"source": "a:1", "cause": "overlong", "message": "m"}]),
    "summary.json": (all_of_run, SUMMARY),
    "env.json": (all_of_run, {"python": "3", "system": "s", "gpus": ["a"], "packages": {"torch": "2", "x": None}}),
    "health.json": (all_of_run, {"time": 1e9, "every": 5.0, "writer": {"machine": "m", "pid": 1, "born": 3}, "ranks": [RANK]}),
    "run.lock": (locked, {"token": "t", "host": "h", "machine": "m", "boot": "b", "pid": 1, "born": 2, "time": 1e9}),
    "config.yaml": (config, CONFIG),
    "checkpoints/iter_3/config.yaml": (config, CONFIG),
    "checkpoints/.partial-iter_6/saving.json": (lambda run: str(saving(run)), {"step": 6, "bytes": 100, "time": 1e9, "copied_to": None}),
    "checkpoints/iter_3/state.json": (state, STATE),
    "checkpoints/iter_3/integrity.json": (sums, {"algorithm": "xxh3_128", "files": {"state.json": "00", "rank0_0.bin": ["00"]}}),
    "checkpoints/iter_3/index.json": (lambda run: Index(run / "checkpoints" / "iter_3"), INDEX),
    "bad_steps/step_2.json": (lambda run: table(Step.read(run, 2)), BAD_STEP),
    "teacher/teacher.json": (tokens, None),
    "export/zoo_settings.json": (exported, SETTINGS),
    "export/zoo_files.json": (exported, {"algorithm": "xxh3_128", "files": {"config.json": None}}),
    "export/generation_config.json": (exported, {"eos_token_id": [1, 2]}),
    "native/zoo.json": (converted, ABOUT),
    "adapter_config.json": (lambda run: check_config(read_object(run / "adapter_config.json"), "there", Sizes(4, 8.0), ["a.q_proj"]), ADAPTER),
}  # fmt: skip
DEEP = [b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"step": 1, "loss": ' + b"[" * 500 + b"]" * 500 + b"}"]
TEXTS = [b"", b" ", b"{}", b"[]", b"null", b"1", b'"x"', b"\xff\xfe{}", b'{"step": 1', b"1" * 5000, b'{"step": ' + b"9" * 5000 + b"}", b"\0" * 64,
         b'{"step": 1, "step": -1}', b"NaN", *DEEP]  # fmt: skip
ODD = [
    -1, 0, 1, 10**15, 10**30, 10**400, -(10**30), 1e308, float("nan"), float("inf"), 0.5, True, False, None, "", "x", "\ud800", "x" * 5000, "../x",
    "/etc/passwd", "\0", "\x1b[31m", [], [[]], [1], ["x"], [None], {}, {"": 1}, {"a": {}}, {"a": [1]}, *NUMBERS,
]  # fmt: skip
odd = st.sampled_from([json.dumps(value) for value in ODD]).map(json.loads)


def one_sentence(text: str) -> None:
    assert text and "\n" not in text and len(text) < 2500, text[:3000]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with one of each file that zoo reads back."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    for name, (_, content) in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(written(name, content))
    (folder / "checkpoints/iter_3/hf").mkdir()
    (folder / "export/config.json").write_text("{}")
    (folder / "checkpoints/iter_3/rank0_0.bin").write_bytes(bytes(4096))
    (folder / "teacher/teacher.json").unlink()
    given = {"top_k": 2, "temperature": 1.0, "vocabulary": 50, "model": "m", "data": "d", "rows": 1}
    kinds = np.ones((3, 2), np.int32), np.ones((3, 2), np.float32), np.ones(3, np.float32)
    TokenWriter(folder / "teacher", given).write(0, [RowTokens(b"0" * 16, *kinds)])
    return folder


def written(name: str, content: Any) -> bytes:
    if name.endswith(".yaml"):
        return str(content).encode()
    if name.endswith(".jsonl"):
        return "".join(f"{json.dumps(line)}\n" for line in content).encode()
    return json.dumps(content).encode()


@st.composite
def changed(draw: Any, value: Any, edits: int = 3) -> Any:
    """A copy of a JSON value, with parts exchanged, left out or added."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, edits))):
        outer, key, inner = None, None, value
        while isinstance(inner, dict | list) and inner and (outer is None or draw(st.integers(0, 2))):
            outer, key = (inner, draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner)))))
            inner = outer[key]
        if outer is None:
            return draw(odd)
        if draw(st.integers(0, 3)):
            outer[key] = draw(odd)
        elif isinstance(outer, dict):
            del outer[key]
        else:
            outer.append(draw(odd))
    return value


def read(name: str, run: Path) -> None:
    """Whatever reads the file ends within a second of this process, well or in one sentence."""
    for _ in range(3):  # Python's garbage collector may fall into one reading, not into each
        began = time.process_time()
        try:
            with within():
                FILES[name][0](run)
        except UserError as error:
            one_sentence(str(error))
        except OSError as error:
            assert file_error(error) is not None, error
        if (seconds := time.process_time() - began) < 1.0:
            return
    raise AssertionError(f"{seconds:.1f} s")


@pytest.mark.parametrize("name", FILES)
def test_as_zoo_wrote_it(name: str, run: Path) -> None:
    FILES[name][0](run)


@fuzzed(0.4)
@given(data=st.data())
@pytest.mark.parametrize("name", FILES)
def test_damaged(name: str, run: Path, data: Any) -> None:
    whole = (run / name).read_bytes()
    parsed = [json.loads(line) for line in whole.splitlines()] if name.endswith(".jsonl") else whole
    if name.endswith(".json"):
        parsed = json.loads(whole)
    kinds = [mutated([whole]), st.sampled_from(TEXTS)]
    if not isinstance(parsed, bytes):
        is_one = not name.endswith(".jsonl")
        kinds += 3 * [changed(parsed).map(lambda v: written(name, v if is_one or isinstance(v, list) else [v]))]
    try:
        (run / name).write_bytes(data.draw(st.one_of(kinds)))
        read(name, run)
    finally:
        (run / name).write_bytes(whole)


@pytest.mark.parametrize("kind", ["folder", "pipe", "endless", "loop", "nowhere", "missing"])
@pytest.mark.parametrize("name", FILES)
def test_no_plain_file(name: str, kind: str, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run"
    shutil.copytree(run, folder)
    path = folder / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "missing":
        path.symlink_to({"endless": "/dev/zero", "loop": path, "nowhere": tmp_path / "nowhere"}[kind])
    read(name, folder)
