"""Parallel equals serial on several GPUs of one host, through NCCL (gloo where there are too few):

    python tests/gpu/ranks.py --ranks 2        # CP2, TP2 + SP, PP2, EP2 against one rank; --ranks 4: TP2 x CP2, EP4, ...

Each rank is a process that runs all cases, one after the other, in worlds of their own. fp32 cases are of the models of
tests/support/matrix.py, whose widths bring mix-ups to light; bf16 cases are of models with widths that the GPU's kernels
take; runs are whole trainings of three steps. Prints a line a case and exits with 1 where one is out of its bound.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package `support`

FP32 = 1e-5, 1e-4  # relative errors of the loss, and of the gradient as one vector
SLACK, ROUNDING = (1.5, 1e-2)  # of bf16: to be no further from fp32 than one rank in bf16 is, times and plus this
FP32_LOSSES = 1e-4  # of each step of a run
START_SECONDS = 240.0  # for a rank's imports
MICRO_BATCHES = 4
CASE_SECONDS = 100.0  # for a case, most of which is compiling kernels; a rank that takes longer hangs


@dataclass(frozen=True)
class Case:
    """One parallel layout of one model, or a run."""

    ranks: int
    model: str  # of matrix.MODELS (fp32), of stacks.STACKS (bf16), or a recipe (a run)
    overrides: tuple[str, ...]
    kind: str = "fp32"  # fp32, bf16, run; exact: a stack in fp32

    @property
    def name(self) -> str:
        sizes = " ".join(text.removeprefix("parallel.") for text in self.overrides)
        return f"{self.kind} {self.model}, {self.ranks} ranks: {sizes or ('dp' if self.ranks > 1 else 'serial')}"


WHOLE = ("parallel.cp=2",)  # samples, where ranks can hold them whole: each comes twice
CP2, TP2, PP2, EP2 = (
    ("parallel.cp=2", "parallel.cp_split=zigzag"),
    ("parallel.tp=2", "parallel.sp=true"),
    ("parallel.pp=2",),
    ("parallel.ep=2",),
)
TP2CP2, EP4 = ("parallel.tp=2", "parallel.sp=true", "parallel.cp=2"), ("parallel.ep=4",)
CASES = {
    2: (
        Case(2, "gdn", CP2),
        Case(2, "gdn", WHOLE),
        Case(2, "omni", CP2),
        Case(2, "omni", WHOLE),
        Case(2, "gdn", TP2),
        Case(2, "omni", TP2),
        Case(2, "omni", PP2),
        Case(2, "omni", EP2),
        Case(2, "qwen35_vl 2b", CP2, "bf16"),
        Case(2, "qwen35_vl 2b", WHOLE, "bf16"),
        Case(2, "qwen35_vl 2b", TP2, "bf16"),
        Case(2, "qwen3_omni", CP2, "bf16"),
        Case(2, "qwen3_omni", EP2, "bf16"),
        Case(2, "qwen3_vl", PP2, "bf16"),
        Case(2, "qwen3_omni_sft", CP2, "run"),
        Case(2, "qwen3_omni_sft", WHOLE, "run"),
        Case(2, "qwen3_omni_sft", ("parallel.overlap_param_gather=true",), "run"),
        Case(2, "qwen3_omni_sft", (*CP2, "parallel.overlap_param_gather=true"), "run"),
        Case(2, "qwen35_vl 2b", ("engine.cuda_graphs=true",), "bf16"),
        Case(2, "qwen35_vl 2b", ("parallel.tp=2", "engine.cuda_graphs=true"), "bf16"),
        Case(2, "qwen3_vl 2b", ("parallel.tp=2", "engine.cuda_graphs=true"), "bf16"),
    ),
    4: (
        Case(4, "gdn", TP2CP2),
        Case(4, "omni", TP2CP2),
        Case(4, "qwen35_vl 2b", TP2CP2, "bf16"),
        Case(4, "qwen3_omni", EP4, "bf16"),
        Case(4, "qwen3_omni_sft", TP2CP2, "run"),
        Case(4, "qwen3_omni_sft", EP4, "run"),
        Case(4, "qwen3_omni_sft", (), "run"),
    ),
}
SHORT = (
    "train.steps=3", "train.global_batch=4", "train.warmup_steps=0", "train.eval_rows=2", "data.lookahead=8", "data.augment=0",
    "data.blank_answers=0", "data.workers=0", "packing.budget=512", "packing.align=8", "log.tensorboard=false", "log.predictions=0", "export=false",
    "engine.doctor=false",
)  # fmt: skip


def references(case: Case) -> list[Case]:
    """The one-rank cases that it is held to: of its kind, and of bf16 (in which a token may go to another expert) in fp32."""
    kinds = ["bf16", "exact"] if case.kind == "bf16" else [case.kind]
    return [Case(1, case.model, (), kind) for kind in kinds]


def prepare(case: Case, root: Path) -> Any:
    """What ranks are given: a plan whose model and batches lie under `root`; overrides of a run."""
    from support.engine import packed_batch, recipe_for
    from support.matrix import MODELS
    from support.rank_gradients import Layout, Plan
    from support.stacks import STACKS

    from zoo.model.build import assemble

    if case.kind == "run":
        return [*SHORT, *case.overrides, f"run.dir={root / case.name.replace(' ', '_').replace(':', '')}"]
    given: Any = MODELS[case.model] if case.kind == "fp32" else STACKS[case.model]
    kept = root / f"{'matrix' if case.kind == 'fp32' else 'stack'} {case.model}"
    precision = "bf16" if case.kind == "bf16" else "fp32"
    more = given.overrides if case.kind == "fp32" else ("train.mtp_loss=0", f"engine.precision={precision}")
    if not kept.exists():
        kept.mkdir()
        folder = given.write(kept / "model")
        processor = assemble(recipe_for(folder, recipe=given.recipe)).processor
        samples = [example.sample for example in given.examples(processor).values()]
        (kept / "batches").write_bytes(
            pickle.dumps([packed_batch(2 * samples[first::MICRO_BATCHES]) for first in range(MICRO_BATCHES)])
        )
        labels = 2 * sum(sample.num_labels for sample in samples)
        (kept / "details").write_bytes(pickle.dumps((str(folder), labels)))
    folder, labels = pickle.loads((kept / "details").read_bytes())
    stored = str(kept / "batches")
    return Plan(
        folder=folder,
        batches=stored,
        labels=labels,
        overrides=(*more, *case.overrides),
        recipe=given.recipe,
        layouts=(Layout(stored),),
    )


def rank_main(folder: Path, rank: int, first: int) -> None:
    """A rank: from task `first` on, every one that it belongs to, as they come; results beside them."""
    import torch
    import torch.distributed as dist
    from support.rank_gradients import run_layouts
    from support.rank_tasks import train

    from zoo.parallel.processes import end_with_parent

    end_with_parent()
    for module in ("transformers.models", "zoo.training.trainer"):  # which cases would import in their time
        importlib.import_module(module)
    destroy = dist.destroy_process_group
    (folder / f"ready.{first}.{rank}").touch()
    for index in itertools.count(first):
        while not (folder / f"{index}.task").exists():
            time.sleep(0.02)
        case, given, port = pickle.loads((folder / f"{index}.task").read_bytes())
        if rank >= case.ranks:
            continue
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        start = time.perf_counter()
        faulthandler.dump_traceback_later(CASE_SECONDS - 5)  # where it hangs

        def leave(found: Any, index: int = index, start: float = start) -> None:
            write(folder / f"{index}.{rank}", (found, time.perf_counter() - start))

        def end_group() -> None:
            if sys.exception() is not None:  # other ranks may wait for this one for ever, and it for them here
                leave(traceback.format_exc())
                os._exit(1)
            destroy()

        dist.destroy_process_group = end_group
        try:
            if case.kind == "run":
                found: Any = train(rank, case.ranks, given, case.model)
            else:
                (found,) = run_layouts(rank, case.ranks, given)
                found.gradients = {name: x.cpu() for name, x in found.gradients.items()}
                found.metrics, found.biases = {}, {}
        except BaseException:
            leave(traceback.format_exc())
            os._exit(1)
        faulthandler.cancel_dump_traceback_later()
        leave(found)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def write(path: Path, value: Any) -> None:
    """Pickle a value into a file that others see when it is whole."""
    new = path.with_name(f".{path.name}")
    new.write_bytes(pickle.dumps(value))
    new.replace(path)


class Ranks:
    """The processes. When one has failed or hangs, all are started anew for the next case."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.processes: list[subprocess.Popen[bytes]] = []
        self.first = self.next = 0  # tasks: that these processes began with, and to come
        self.start()

    def start(self) -> None:
        """Processes that wait for the next task."""
        root = Path(__file__).parents[2]
        command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.ranks", "--folder", str(self.folder)]
        more = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.first = self.next
        for rank in range(self.size):
            mine = [*command, "--first", str(self.first), "--rank", str(rank)]
            with self._log(rank).open("wb") as log:
                started = subprocess.Popen(mine, cwd=root, env=os.environ | more, stdout=log, stderr=log)
            self.processes.append(started)

    def run(self, case: Case, given: Any, port: int) -> list[tuple[Any, float]] | str:
        """By rank what it found and its seconds, or what went wrong."""
        if not self.processes:
            self.start()
        write(self.folder / f"{self.next}.task", (case, given, port))
        files = [self.folder / f"{self.next}.{rank}" for rank in range(case.ranks)]
        self.next += 1
        begins = [self.folder / f"ready.{self.first}.{rank}" for rank in range(self.size)]
        ready, end = False, time.monotonic() + START_SECONDS
        while not all(file.exists() for file in files):
            if not ready and all(file.exists() for file in begins):
                ready, end = True, time.monotonic() + CASE_SECONDS
            ended = [rank for rank, process in enumerate(self.processes) if process.poll() is not None]
            if ended or time.monotonic() > end:
                time.sleep(2.0 if ended else 0.0)  # for others that fail by themselves
                return self._explain(files, ended)
            time.sleep(0.02)
        loaded = [pickle.loads(file.read_bytes()) for file in files]
        return self._explain(files, []) if any(isinstance(found, str) for found, _ in loaded) else loaded

    def _explain(self, files: list[Path], ended: list[int]) -> str:
        self.stop()
        found = {rank: pickle.loads(file.read_bytes())[0] for rank, file in enumerate(files) if file.exists()}
        said = [f"rank {rank}: {text}" for rank, text in found.items() if isinstance(text, str)]
        if said:
            return "\n".join(said)
        silent = [rank for rank in range(len(files)) if rank not in found]
        what = f"rank {ended[0]} has ended" if ended else f"ranks {silent} hang"
        logs = (self._log(rank).read_text(errors="replace")[-3000:] for rank in ended or silent)
        return "\n".join((what, *logs))

    def stop(self) -> None:
        """End all."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []

    def _log(self, rank: int) -> Path:
        return self.folder / f"log.{rank}"


def compare(case: Case, found: list[Any], held_to: list[list[Any]]) -> tuple[bool, str]:
    """Whether a case is within its bounds, and its numbers; `held_to`: what its references found."""
    if case.kind == "run":
        serial = held_to[0][0]
        pairs = list(zip(found[0]["losses"], serial["losses"], strict=True))
        error = max(abs(a - b) / abs(b) for a, b in pairs)
        norms = zip(found[0]["steps"], serial["steps"], strict=True)
        norm = max(abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"] for a, b in norms)
        shown = ", ".join(f"{a:.6f}" for a, _ in pairs)
        return error < FP32_LOSSES, f"losses {shown}: off by {error:.1e}, gradient norms by {norm:.1e}"
    try:
        loss, gradient = errors(found, held_to[-1])
    except AssertionError as error:  # ranks with the same part of a gradient differ
        return False, str(error)
    if case.kind != "bf16":
        return loss < FP32[0] and gradient < FP32[1], f"loss off by {loss:.1e}, gradient by {gradient:.1e}"
    of_one = errors(*held_to)
    good = all(x < SLACK * one + ROUNDING for x, one in zip((loss, gradient), of_one, strict=True))
    return good, (
        f"loss off by {loss:.1e}, gradient by {gradient:.1e} from fp32 (one rank: {of_one[0]:.1e}, {of_one[1]:.1e})"
    )


def errors(found: list[Any], wanted: list[Any]) -> tuple[float, float]:
    """Relative errors of the loss, and of the gradient as one vector."""
    from support.gathered import full_gradients, total_loss

    got, want = full_gradients(found), full_gradients(wanted)
    assert got.keys() == want.keys(), f"one of both lacks {sorted(got.keys() ^ want.keys())}"
    apart = sum(float((got[name].double() - x.double()).square().sum()) for name, x in want.items())
    size = sum(float(x.double().square().sum()) for x in want.values())
    return abs(total_loss(found) / total_loss(wanted) - 1), (apart / size) ** 0.5


def check(cases: tuple[Case, ...], say: Callable[[str], None]) -> bool:
    """Run cases and what they are held to; whether all are within their bounds. Each is reported when it ends."""
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = Ranks(folder, max(case.ranks for case in cases))  # whose imports go on beside what stands here
        ahead = ThreadPoolExecutor(1)  # makes what later cases are given while ranks work on earlier ones
        try:
            from zoo.launch.rank_group import free_port

            everything = list(dict.fromkeys(each for case in cases for each in (*references(case), case)))
            tasks = [(case, ahead.submit(prepare, case, folder)) for case in everything]
            results: dict[Case, list[Any]] = {}
            for case, given in tasks:
                wanted = references(case)
                serial = case.ranks == 1
                known = serial or all(one in results for one in wanted)
                found = ranks.run(case, given.result(), free_port()) if known else "there is nothing to hold it to"
                if isinstance(found, str):
                    good = False
                    say(f"FAILED {case.name}: {found}")
                    continue
                results[case], seconds = [held for held, _ in found], max(seconds for _, seconds in found)
                right, metrics = (
                    (True, "") if serial else compare(case, results[case], [results[one] for one in wanted])
                )
                good = good and right
                say(f"{'ok' if right else 'WRONG':<6} {case.name}: {metrics} ({seconds:.1f} s)")
        finally:
            ranks.stop()
            ahead.shutdown(cancel_futures=True)
    return good


def main() -> int:
    """A rank, or the whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=sorted(CASES), default=2)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given.folder, given.rank, given.first)
        return 0
    cases = tuple(case for case in CASES[given.ranks] if given.only in case.name)
    if not cases:
        parser.error(f"--only {given.only}: no case is named so; there are {[c.name for c in CASES[given.ranks]]}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the ranks are ended
    return 0 if check(cases, lambda line: print(line, flush=True)) else 1


if __name__ == "__main__":
    sys.exit(main())
