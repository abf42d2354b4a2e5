"""`bad_steps/step_N.json` in a run folder: the rows of a bad step, from all ranks, and the data's position before it.

It holds the step, the cause, loss and gradient norm (null where they are not finite), every packed row with its own loss
and its samples (source file and line, kind, tokens), and the data's position, from which `zoo inspect` packs the
same rows again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from zoo.config.schema import TrainConfig
from zoo.data.sample import MicroBatch
from zoo.errors import UserError
from zoo.files import finite, write_atomically
from zoo.logging import messages
from zoo.logging.run_log import RunLog
from zoo.parallel.world import World
from zoo.records import Check, is_count, is_measure, is_object, is_text, list_of, read_record
from zoo.training.bad_steps.detector import BadStep, BadStepDetector
from zoo.training.step_metrics import LossSums
from zoo.types import JsonObject

FOLDER = "bad_steps"
_LONGEST = 2**30  # bytes of a file, which has a line for each sample of a step
_SAMPLE: dict[str, Check] = {"source": is_text}
_ROW: dict[str, Check] = {
    "rank": is_count, "tokens": is_count, "loss": is_measure, "samples": list_of(_SAMPLE, ("source",)),
}  # fmt: skip
_FIELDS: dict[str, Check] = {
    "step": is_count, "why": is_text, "rows": list_of(_ROW, ("rank", "tokens", "loss", "samples")), "data": is_object,
}  # fmt: skip


def write(
    run_dir: Path,
    numbers: JsonObject,
    bad: BadStep,
    batches: Sequence[MicroBatch],
    loss_sums: Sequence[LossSums],
    data_position: JsonObject,
    world: World,
) -> Path:
    """Gather the ranks' rows of a step and write them; every rank calls it.

    Args:
        numbers: step, loss and grad_norm.
        batches: this rank's micro-batches.
        loss_sums: sums of each micro-batch, on the ranks that count the loss.
        data_position: the loader's state before the step.
    """
    rank_record: JsonObject = {"rank": world.dp_rank, "rows": None, "losses": ()}
    if world.counts_data:
        rank_record["rows"] = []
        for batch in (batch for batch in batches if not batch.filler):
            facts = zip(batch.sources, batch.kinds, batch.lengths, strict=True)
            samples = [{"source": source, "kind": kind, "tokens": length} for source, kind, length in facts]
            rank_record["rows"].append({"tokens": batch.total, "labels": batch.num_labels, "samples": samples})
    if world.counts_loss:
        rank_record["losses"] = [
            (float(metric_totals["nll"]), float(metric_totals["weight"])) for metric_totals in loss_sums
        ]
    everyone: list[JsonObject] = [{} for _ in range(world.size)]
    dist.all_gather_object(everyone, rank_record)
    path = run_dir / FOLDER / f"step_{numbers['step']}.json"
    if world.is_main:
        path.parent.mkdir(exist_ok=True)
        rows = _rows_with_losses(everyone)
        record = {**numbers, "cause": bad.cause, "why": bad.why, "rows": rows, "data": data_position}
        write_atomically(path, json.dumps(finite(record), indent=1, ensure_ascii=False) + "\n")
    return path


def _rows_with_losses(everyone: Sequence[JsonObject]) -> list[JsonObject]:
    """Rows of all data-parallel ranks, each with its loss, which context-parallel ranks have parts of."""
    totals: dict[tuple[int, int], tuple[float, float]] = {}
    for rank_record in everyone:
        for number, (nll, weight) in enumerate(rank_record["losses"]):
            before = totals.get((rank_record["rank"], number), (0.0, 0.0))
            totals[rank_record["rank"], number] = before[0] + nll, before[1] + weight
    rows = []
    for rank_record in sorted(
        (rank_record for rank_record in everyone if rank_record["rows"] is not None),
        key=lambda rank_record: rank_record["rank"],
    ):
        for number, row in enumerate(rank_record["rows"]):
            nll, weight = totals.get((rank_record["rank"], number), (0.0, 0.0))
            rows.append({"rank": rank_record["rank"], "micro_batch": number, "loss": nll / (weight or 1.0), **row})
    return rows


def log(log: RunLog, step: int, bad: BadStep, detector: BadStepDetector, file: Path | None) -> None:
    """Log a bad step. `file`: with its rows; None for a step without labels, which has nothing to look into, and is said once."""
    if file is None:
        log.event("skip", step, cause=bad.cause, why=bad.why)
        if detector.counts[bad.cause] == 1:
            log.say(messages.at_step_without_labels(step, bad.why))
        return
    log.event("skip", step, cause=bad.cause, why=bad.why, file=str(file))
    log.say(f"step {step} is not applied: {bad.why}; `zoo inspect {file}` shows its rows")
    if detector.new_level is not None:
        log.event("new_level", step, loss=detector.new_level)
        log.say(messages.at_new_level(step, detector.new_level, detector.train))


def read(path: Path) -> JsonObject:
    """A bad step's file.

    Raises:
        UserError: there is none, or it is none.
    """
    if not path.exists():
        there = sorted(file.name for file in path.parent.glob("step_*.json"))
        known = ", ".join(there[:5]) + (f" and {len(there) - 5} more" if len(there) > 5 else "")
        raise UserError(f"{path}: no such file; {path.parent} has {known or 'no bad steps'}")
    hint = f"wanted the file of a bad step, {FOLDER}/step_N.json of a run folder"
    return read_record(path, _FIELDS, ("step", "why", "rows", "data"), hint=hint, most=_LONGEST)


def too_many(
    step: int, bad: BadStep, detector: BadStepDetector, saved: Path | None, run_dir: Path, train: TrainConfig
) -> UserError:
    """The error that ends the run: why, what is kept, and what can be done."""
    row = detector.row_ends
    if not row:
        steps = f"{detector.limit} bad steps of the last {detector.span}"
    else:
        steps = "1 bad step" if detector.in_a_row == 1 else f"{detector.in_a_row} bad steps in a row"
    kept = f"the weights are those before them, saved in {saved}; " if saved else ""
    if row and train.on_bad_step == "stop":
        more = "raise train.bad_steps, or leave such steps out with train.on_bad_step=skip"
    elif row and bad.cause == "spike" and train.on_new_level == "stop":
        more = "raise train.skip_limit, or train at the new level with train.on_new_level=take"
    else:
        more = "or raise train.skip_limit"
    return UserError(
        f"{steps}, the last one step {step}: {bad.why}; none was applied, {kept}"
        f"`zoo inspect {run_dir / FOLDER / f'step_{step}.json'}` shows the rows; correct them, lower train.lr or "
        f"train.clip_grad (run.accept_changes=[data,train] allows that), {more}; the same command continues after these steps"
    )
