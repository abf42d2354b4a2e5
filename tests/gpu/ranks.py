"""Parallel equals serial on several GPUs of one host, through NCCL (gloo where there are too few):

    python tests/gpu/ranks.py --ranks 2        # CP2, TP2 + SP, PP2, EP2 against one rank; --ranks 4: TP2 x CP2, EP4, ...

Each rank is a process that runs all cases, one after the other, in worlds of their own. fp32 cases are of the models of
tests/support/matrix.py, whose widths bring mix-ups to light; bf16 cases are of models with widths that the GPU's kernels
take; runs are whole trainings of three steps. Prints a line a case and exits with 1 where one is out of its bound.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package `support`

FP32, BF16 = (1e-5, 1e-4), (1e-2, 6e-2)  # relative errors of the loss, and of the gradient as one vector
FP32_LOSSES = 1e-4  # of each step of a run
CASE_SECONDS = 150.0


@dataclass(frozen=True)
class Case:
    """One parallel layout of one model, or a run."""

    ranks: int
    model: str  # of matrix.MODELS (fp32), of stacks.STACKS (bf16), or a recipe (a run)
    overrides: tuple[str, ...]
    kind: str = "fp32"

    @property
    def name(self) -> str:
        sizes = " ".join(text.removeprefix("parallel.") for text in self.overrides)
        return f"{self.kind} {self.model}, {self.ranks} ranks: {sizes or 'dp'}"


CP2, TP2, PP2, EP2 = (
    ("parallel.cp=2",),
    ("parallel.tp=2", "parallel.sp=true"),
    ("parallel.pp=2",),
    ("parallel.ep=2",),
)
TP2CP2, EP4 = ("parallel.tp=2", "parallel.sp=true", "parallel.cp=2"), ("parallel.ep=4",)
CASES = {
    2: (
        Case(2, "gdn", CP2),
        Case(2, "omni", CP2),
        Case(2, "gdn", TP2),
        Case(2, "omni", TP2),
        Case(2, "omni", PP2),
        Case(2, "omni", EP2),
        Case(2, "qwen35_vl moe", CP2, "bf16"),
        Case(2, "qwen35_vl moe", TP2, "bf16"),
        Case(2, "qwen3_omni", CP2, "bf16"),
        Case(2, "qwen3_omni", EP2, "bf16"),
        Case(2, "qwen3_vl", PP2, "bf16"),
        Case(2, "qwen3_omni_sft", CP2, "run"),
    ),
    4: (
        Case(4, "gdn", TP2CP2),
        Case(4, "omni", TP2CP2),
        Case(4, "qwen35_vl moe", TP2CP2, "bf16"),
        Case(4, "qwen3_omni", EP4, "bf16"),
        Case(4, "qwen3_omni_sft", TP2CP2, "run"),
        Case(4, "qwen3_omni_sft", EP4, "run"),
        Case(4, "qwen3_omni_sft", (), "run"),
    ),
}
SHORT = (
    "train.steps=3", "train.global_batch=4", "train.warmup_steps=0", "train.eval_rows=2", "data.lookahead=8", "data.augment=0",
    "data.blank_answers=0", "packing.budget=512", "packing.align=8", "log.tensorboard=false", "export=false",
    "engine.doctor=false",
)  # fmt: skip


def references(cases: tuple[Case, ...]) -> list[Case]:
    """The one-rank cases that the others are held to."""
    return list(dict.fromkeys(Case(1, case.model, (), case.kind) for case in cases))


def prepare(case: Case, root: Path) -> Any:
    """What ranks are given: a plan whose model and batches lie under `root`; overrides of a run."""
    from support.engine import packed_batch, recipe_for
    from support.matrix import MODELS
    from support.rank_tasks import Layout, Plan
    from support.stacks import STACKS

    from zoo.engine.build import assemble

    if case.kind == "run":
        return [*SHORT, *case.overrides, f"run.dir={root / case.name.replace(' ', '_').replace(':', '')}"]
    kept = root / f"{case.kind} {case.model}"
    given = MODELS[case.model] if case.kind == "fp32" else STACKS[case.model]
    more = given.overrides if case.kind == "fp32" else ("train.mtp_loss=0", "engine.precision=bf16")
    if not kept.exists():
        kept.mkdir()
        folder = given.write(kept / "model")
        processor = assemble(recipe_for(folder, recipe=given.recipe)).processor
        samples = [example.sample for example in given.examples(processor).values()]
        (kept / "batches").write_bytes(
            pickle.dumps([packed_batch(samples[0::2]), packed_batch(samples[1::2])])
        )
        labels = sum(sample.num_labels for sample in samples)
        (kept / "facts").write_bytes(pickle.dumps((str(folder), labels)))
    folder, labels = pickle.loads((kept / "facts").read_bytes())
    stored = str(kept / "batches")
    return Plan(
        folder=folder,
        batches=stored,
        labels=labels,
        overrides=(*more, *case.overrides),
        recipe=given.recipe,
        layouts=(Layout(stored),),
    )


def rank_main(folder: Path, rank: int) -> None:
    """A rank: every case of tasks.pickle that it belongs to, results beside it."""
    import torch
    from support.rank_tasks import run_layouts, train

    for index, (case, given, port) in enumerate(pickle.loads((folder / "tasks.pickle").read_bytes())):
        if rank >= case.ranks:
            continue
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        start = time.perf_counter()
        try:
            if case.kind == "run":
                found: Any = train(rank, case.ranks, given, case.model)
            else:
                (found,) = run_layouts(rank, case.ranks, given)
                found.gradients = {name: x.cpu() for name, x in found.gradients.items()}
                found.figures, found.biases = {}, {}
        except BaseException:
            found = traceback.format_exc()
        (folder / f"{index}.{rank}").write_bytes(pickle.dumps((found, time.perf_counter() - start)))
        if isinstance(found, str):  # the other ranks may wait for this one for ever
            sys.exit(1)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def launch(tasks: list[Any], folder: Path, ranks: int) -> None:
    """All ranks over all tasks; those that are left when one has failed, or at the time limit, are ended."""
    (folder / "tasks.pickle").write_bytes(pickle.dumps(tasks))
    me = [sys.executable, "-W", "ignore", "-m", "tests.gpu.ranks", "--folder", str(folder), "--rank"]
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    processes = [subprocess.Popen([*me, str(rank)], cwd=root, env=environment) for rank in range(ranks)]
    end = time.monotonic() + CASE_SECONDS * len(tasks)
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        time.sleep(0.2)
    for process in processes:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def compare(case: Case, found: list[Any], serial: list[Any]) -> tuple[bool, str]:
    """Whether a case is within its bounds, and the figures."""
    from support.gathered import full_gradients, total_loss

    if case.kind == "run":
        pairs = list(zip(found[0]["losses"], serial[0]["losses"], strict=True))
        error = max(abs(a - b) / abs(b) for a, b in pairs)
        norms = zip(found[0]["steps"], serial[0]["steps"], strict=True)
        norm = max(abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"] for a, b in norms)
        shown = ", ".join(f"{a:.6f}" for a, _ in pairs)
        return error < FP32_LOSSES, f"losses {shown}: off by {error:.1e}, gradient norms by {norm:.1e}"
    wanted, got = full_gradients(serial), full_gradients(found)
    assert wanted.keys() == got.keys()
    apart = sum(float((got[name] - want).double().square().sum()) for name, want in wanted.items())
    size = sum(float(want.double().square().sum()) for want in wanted.values())
    gradient, loss = (apart / size) ** 0.5, abs(total_loss(found) / total_loss(serial) - 1)
    bounds = FP32 if case.kind == "fp32" else BF16
    return loss < bounds[0] and gradient < bounds[1], f"loss off by {loss:.1e}, gradient by {gradient:.1e}"


def check(cases: tuple[Case, ...], say: Callable[[str], None]) -> bool:
    """Run cases and what they are held to; whether all are within their bounds."""
    from zoo.engine.launch import free_port

    serial = references(cases)
    everything = [*serial, *cases]
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tasks = [(case, prepare(case, folder), free_port()) for case in everything]
        launch(tasks, folder, max(case.ranks for case in cases))
        results: dict[Case, list[Any]] = {}
        for index, case in enumerate(everything):
            files = [folder / f"{index}.{rank}" for rank in range(case.ranks)]
            loaded = [pickle.loads(path.read_bytes()) for path in files if path.exists()]
            failed = [found for found, _ in loaded if isinstance(found, str)]
            if failed or len(loaded) < case.ranks:
                good = False
                say(f"FAILED {case.name}: {failed[0] if failed else 'no result of some rank'}")
                continue
            results[case] = [found for found, _ in loaded]
            seconds = max(seconds for _, seconds in loaded)
            one = Case(1, case.model, (), case.kind)
            if case.ranks > 1 and one in results:
                right, figures = compare(case, results[case], results[one])
                good = good and right
                say(f"{'ok' if right else 'WRONG':<6} {case.name}: {figures} ({seconds:.1f} s)")
    return good


def main() -> int:
    """A rank, or the whole."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, choices=sorted(CASES), default=2)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given.folder, given.rank)
        return 0
    cases = tuple(case for case in CASES[given.ranks] if given.only in case.name)
    return 0 if check(cases, lambda line: print(line, flush=True)) else 1


if __name__ == "__main__":
    sys.exit(main())
