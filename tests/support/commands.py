"""`zoo` as users run it, on small data: each command in a process of its own, and what it leaves in the run folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = 6


def environment(**more: str) -> dict[str, str]:
    """The environment of a command on the CPU that is no rank of another run, with further variables."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in dropped and "SLURM" not in name}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **more}


def python(
    *arguments: str | Path, cwd: Path | None = None, text: str | None = None, timeout: int = 400, **env: str
) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, once it has ended; `text` is its input, `env` is added to its environment."""
    command, env = [sys.executable, *map(str, arguments)], environment(**env)
    return subprocess.run(command, input=text, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


@dataclass
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str


@dataclass
class Running:
    """A command that runs."""

    pid: int
    path: Path  # of its stdout
    code: Callable[[], int]

    def until(self, reached: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait for a condition; fails where the command ends, or takes too long, before it holds."""
        deadline = time.monotonic() + seconds
        while not reached():
            alive = Path(f"/proc/{self.pid}/stat").exists()
            assert alive and time.monotonic() < deadline, self.said()
            time.sleep(0.005)

    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)

    def said(self) -> str:
        err = Path(f"{self.path}.err")
        return self.path.read_text() + (err.read_text() if err.exists() else "")

    def ended(self) -> Ended:
        code = self.code()
        err = Path(f"{self.path}.err")
        return Ended(code, self.path.read_bytes().decode(), err.read_text() if err.exists() else "")


class Zoo:
    """Starts commands, one at a time."""

    def __init__(self, server: subprocess.Popen[str], folder: Path, data: Path) -> None:
        self.server, self.folder, self.data, self.count = server, folder, data, 0

    def start(self, *argv: str, tty: bool = False, limits: Mapping[str, int] | None = None) -> Running:
        self.count += 1
        out = self.folder / f"out{self.count}"
        assert self.server.stdin is not None
        request = {"argv": argv, "cwd": str(self.folder), "out": str(out), "tty": tty, "limits": limits or {}}
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        pid = self.answer()["pid"]
        while not out.exists():
            time.sleep(0.005)
        return Running(pid, out, lambda: self.answer()["code"])

    def answer(self) -> dict[str, Any]:
        assert self.server.stdout is not None
        return json.loads(self.server.stdout.readline())

    def __call__(self, *argv: str, tty: bool = False, limits: Mapping[str, int] | None = None) -> Ended:
        return self.start(*argv, tty=tty, limits=limits).ended()

    def train_arguments(self, run_dir: Path, *overrides: str) -> list[str]:
        """The small run: STEPS steps of one short packed row, evaluated on two rows."""
        fixed = {
            "recipe": "qwen3_omni_sft", "size": "tiny", "nproc": "1", "hardware": "cpu", "run.dir": run_dir,
            "data.train": self.data / "train.jsonl", "data.eval": self.data / "heldout.jsonl",
            "packing.budget": 96, "train.global_batch": 2, "train.warmup_steps": 2, "train.log_every": 1,
            "train.steps": STEPS, "engine.threads": 1, "data.outside_root": "true",  # bundled media
        }  # fmt: skip
        return ["train", *(f"{key}={value}" for key, value in fixed.items()), *overrides]

    def train(self, run_dir: Path, *overrides: str, tty: bool = False) -> Ended:
        return self(*self.train_arguments(run_dir, *overrides), tty=tty)

    def start_training(self, run_dir: Path, *overrides: str) -> Running:
        return self.start(*self.train_arguments(run_dir, *overrides))

    def refused(self, *argv: str, limits: Mapping[str, int] | None = None) -> str:
        """The one sentence that a mistake gets."""
        return self.refusal(self(*argv, limits=limits))

    @staticmethod
    def refusal(done: Ended) -> str:
        """The one sentence that a command ended with."""
        assert done.code == 2, done
        assert done.err.startswith("zoo: error: ") and done.err.count("\n") == 1, done.err
        return done.err.removeprefix("zoo: error: ").strip()


def bundled(kind: str) -> dict[str, Any]:
    """The first bundled row of that kind, with absolute paths."""
    import zoo.data.digits

    folder = Path(zoo.data.digits.__file__).parent
    rows = map(json.loads, (folder / "train.jsonl").read_text(encoding="utf-8").splitlines())
    row = next(row for row in rows if row["kind"] == kind)
    for key in ("images", "videos", "audios"):
        if key in row:
            row[key] = [str(folder / name) for name in row[key]]
    return row


def text_row(number: int) -> dict[str, Any]:
    question = {"role": "user", "content": f"Repeat {number}."}
    return {"kind": "text", "messages": [question, {"role": "assistant", "content": str(number)}]}


def write_rows(path: Path, rows: list[Any]) -> Path:
    """A JSONL file; a string is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """The steps of train.jsonl."""
    records = map(json.loads, (run_dir / "train.jsonl").read_text(encoding="utf-8").splitlines())
    return [record for record in records if "event" not in record]


def events(run_dir: Path) -> list[str]:
    file = run_dir / "train.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line).get("event", "step") for line in lines if line.endswith("\n")]


def summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))


def metrics(run_dir: Path) -> list[tuple[float, ...]]:
    """What must be the same to the bit in runs that are the same."""
    return [tuple(r[k] for k in ("step", "loss", "grad_norm", "lr", "real_tokens")) for r in logged(run_dir)]


def weights(run_dir: Path) -> bytes:
    return (run_dir / "export" / "model.safetensors").read_bytes()
