"""Which checkpoint a run resumes from, and which are kept."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch.distributed as dist

from zoo.checkpoint import integrity
from zoo.checkpoint.storage.disk import Damaged
from zoo.config.checks.training import flat, parse_metric
from zoo.config.compose import load_recipe
from zoo.config.locate import BASE, HF_PART, LONGEST_STATE, STATE, Place, checkpoints, locate, look, read_arch, step_of
from zoo.config.schema import Recipe, TrainConfig
from zoo.errors import UserError
from zoo.files import read_object, unheld
from zoo.logging.result import evaluations_by_step
from zoo.model.build import find_source
from zoo.model.embedding_files import MODULES
from zoo.parallel.object_group import agreed
from zoo.records import conforms, is_text

BEST = "best"  # a link in the folder of checkpoints
DAMAGED = "damaged_"  # prefix of the name that an unreadable checkpoint gets
_RECIPE = "config.yaml"


def faults(checkpoint: Path, *, read: bool = True) -> dict[str, str]:
    """What is wrong with a checkpoint's files, by file; the ranks share the work and all know the result.

    Without `read`, tensors are left to whoever loads them: see `together`.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return _of_all_ranks(integrity.damaged(checkpoint, rank, ranks, read=read))


def _of_all_ranks(rank_faults: dict[str, str]) -> dict[str, str]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rank_faults
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, rank_faults)
    return {name: fault for faults_of_rank in everyone for name, fault in faults_of_rank.items()}


@contextlib.contextmanager
def together() -> Iterator[None]:
    """All ranks load inside the block, each what it needs.

    Raises:
        Damaged: what any of them has read is not what was written; on all of them.
    """
    damage: dict[str, str] = {}
    try:
        yield
    except Damaged as error:
        damage = error.faults
    if damage := _of_all_ranks(damage):
        raise Damaged(damage) from None


def is_beside_weights(name: str) -> bool:
    """Whether a checkpoint's file serves its conversion alone: a run has what it says from elsewhere."""
    return name == _RECIPE or (name.startswith(f"{HF_PART}/") and ".." not in Path(name).parts)


def restore(checkpoint: Path, damaged: Iterable[str]) -> dict[str, Path]:
    """Take damaged files beside the weights from where they are whole: other checkpoints, the export, what the run started from.

    Returns the copy that was taken, by file; what is in none of them has none.
    """
    run_dir = checkpoint.parent.parent
    others = [path for path in sorted(checkpoint.parent.glob("*iter_*")) if path != checkpoint]
    model_folders = [run_dir / "export", run_dir / BASE, *_source_files(checkpoint)]

    def copies(name: str) -> list[Path]:
        own = [run_dir / _RECIPE] if name == _RECIPE else [folder / Path(name).name for folder in model_folders]
        return [*(folder / name for folder in others), *own]

    taken = {name: integrity.restore(checkpoint, name, copies(name)) for name in damaged}
    return {name: copy for name, copy in taken.items() if copy is not None}


def _source_files(checkpoint: Path) -> list[Path]:
    """The folder with the processor's files that a checkpoint's run started from, if it is one here."""
    try:
        weights = read_object(checkpoint / STATE, most=LONGEST_STATE).get("weights")
        source = look(weights["init"]) if conforms(weights, {"init": is_text}, ("init",)) else None
    except (OSError, UserError):
        return []
    return [source.files] if source else []


def check_beside_weights(run: Place) -> None:
    """Before a run's checkpoint is read: what is damaged beside its weights is restored, and said, where it is whole elsewhere.

    All ranks call it alike. Raises UserError where it is not.
    """
    if run.kind != "run":
        return

    def repair() -> tuple[dict[str, str], dict[str, Path]]:
        damage = integrity.damaged(run.folder, concerns=is_beside_weights)
        damage.pop(integrity.MANIFEST, None)  # named when the weights are read
        restored = restore(run.folder, damage) if damage else {}
        for name, copy in restored.items():
            _warn(f"{damage.pop(name)}; it was taken from {copy}")
        return damage, restored

    left, _ = agreed(repair)
    if left:
        raise UserError(
            f"{_summary(list(left.values()))}; no whole copy of it was found. Go on with the run (the same zoo train command): it "
            "needs the weights alone, and its next checkpoint has these files anew; or take another checkpoint"
        )


def is_reward_model(source: Place) -> bool:
    """Whether a checkpoint gives an answer one number: by its run's recipe, or by its config.json."""
    if source.kind == "run":
        train = _training_of_run(source)
        return train is not None and train.scores
    names = read_arch(source.files).get("architectures") or ()
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def is_embedding_model(source: Place) -> bool:
    """Whether a checkpoint gives vectors: by its run's recipe, or by its files for sentence-transformers."""
    if source.kind == "run":
        train = _training_of_run(source)
        return train is not None and train.embeds
    return (source.files / MODULES).is_file()


def _training_of_run(source: Place) -> TrainConfig | None:
    """How a run trained its model; None where another zoo wrote the recipe, with keys that are not known here."""
    try:
        return load_recipe(source.folder / "config.yaml").train
    except UserError:
        return None


def language_model(path: str | Path) -> Place:
    """Where the weights of a language model lie, what is damaged beside them restored first.

    Raises:
        UserError: there are none, or they are those of a reward or embedding model, which says nothing.
    """
    source = locate(str(path))
    check_beside_weights(source)
    if is_reward_model(source):
        raise UserError(
            f"{path}: it is a reward model, which gives an answer one number and has no probabilities of tokens; wanted a language "
            "model. `zoo convert` makes a Hugging Face folder of it, whose scores transformers gives (docs/preference.md)"
        )
    if is_embedding_model(source):
        raise UserError(
            f"{path}: it is an embedding model, which has vectors and no probabilities of tokens; wanted a language model. `zoo eval` "
            "ranks by its vectors, and its export is one of sentence-transformers (docs/retrieval.md)"
        )
    return source


def repaired_source(recipe: Recipe) -> Place | None:
    """Where a recipe's weights lie, None for random ones; damaged files beside a run's weights are restored first.

    Every rank calls it. Raises UserError where there are no weights, or a damaged file has no whole copy.
    """
    source = find_source(recipe)
    if source is not None:
        check_beside_weights(source)
    return source


def _warn(text: str) -> None:
    print(f"zoo: WARNING: {text}", file=sys.stderr, flush=True)


def _summary(sentences: list[str]) -> str:
    return sentences[0] + (f" (and {len(sentences) - 1} more faults)" if len(sentences) > 1 else "")


@dataclass(frozen=True)
class Chosen:
    """The checkpoint to resume from, None where a run has none yet; and what was skipped, name -> why."""

    folder: Path | None
    passed_over: dict[str, str] = field(default_factory=dict)
    side_files: dict[str, str] = field(default_factory=dict)  # damaged beside the weights -> what became of it


def choose(run_dir: Path, known: Mapping[str, dict[str, str]] | None = None) -> Chosen:
    """The newest whole checkpoint of a run. Newer ones that are not are put out of the way, and that is said.

    Called by all ranks alike. Tensors are checked as they are loaded. Where a load has found some damaged, it is called
    again with what is `known` (faults by file, by checkpoint), and reads the others whole.

    Raises:
        UserError: there are checkpoints, but none that is whole.
    """
    passed_over: dict[str, str] = {}
    for checkpoint in reversed(
        agreed(lambda: checkpoints(run_dir))
    ):  # a shared file system may show others to each rank
        damage = (known or {}).get(checkpoint.name) or faults(checkpoint, read=known is not None)
        if all(map(is_beside_weights, damage)):
            if passed_over:
                _put_away(run_dir, passed_over, checkpoint)
            side_files = agreed(partial(_repair_beside_weights, checkpoint, damage))
            return Chosen(checkpoint, passed_over, side_files)
        passed_over[checkpoint.name] = _summary(list(damage.values()))
    if passed_over:
        newest = next(iter(passed_over.values()))
        raise UserError(
            f"{run_dir}: no checkpoint there is whole ({newest}); put one back, or use another run.dir to start anew"
        )
    return Chosen(None)


def _repair_beside_weights(checkpoint: Path, damage: Mapping[str, str]) -> dict[str, str]:
    """Restore what is damaged beside the weights of the checkpoint to resume from, and say what became of it."""
    step = step_of(checkpoint)
    if checkpoint.name != f"iter_{step}":
        _warn(f"{checkpoint} holds step {step}, and the run resumes from there")
    lost = (
        "no whole copy of it was found. The weights are whole and the run resumes from them; this checkpoint can't be "
        "converted by itself, later ones have the file anew"
    )
    restored = restore(checkpoint, damage) if damage else {}
    copies = {name: f"it was taken from {copy}" for name, copy in restored.items()}
    outcomes = {name: f"{fault}; {copies.get(name, lost)}" for name, fault in damage.items()}
    for outcome in outcomes.values():
        _warn(outcome)
    return outcomes


def _put_away(run_dir: Path, passed_over: dict[str, str], checkpoint: Path) -> None:
    """Rename what is damaged, so that nothing takes it for the newest."""
    if dist.is_initialized():
        dist.barrier()  # the others have seen the names too
    if not dist.is_initialized() or dist.get_rank() == 0:
        for name, why in passed_over.items():
            folder = run_dir / "checkpoints" / name
            _warn(f"{why}; it is now {DAMAGED}{name}, and the run resumes from {checkpoint.name}")
            integrity.remove([folder.with_name(DAMAGED + name)])
            with contextlib.suppress(OSError):
                os.replace(folder, folder.with_name(DAMAGED + name))
        best = run_dir / "checkpoints" / BEST
        if best.is_symlink() and not best.exists():
            best.unlink()
    if dist.is_initialized():
        dist.barrier()


def best_of(run_dir: Path, metric: str | None) -> Path | None:
    """The evaluated checkpoint of a run that is best at a held-out metric (`train.keep_best`); the newest where several are equal.

    Metrics count that are of the same rows as the last ones: others can't be compared with them.
    """
    if metric is None:
        return None
    evaluations = evaluations_by_step(run_dir)
    latest = evaluations[max(evaluations)].get("data") if evaluations else None
    evaluations = {step: metrics for step, metrics in evaluations.items() if metrics.get("data") == latest}
    name, sign = parse_metric(metric, "train.keep_best")
    best: tuple[float, int, Path] | None = None
    for checkpoint in checkpoints(run_dir):
        step = step_of(checkpoint)
        value = flat(evaluations.get(step, {})).get(name)
        if value is not None and value == value and (best is None or (sign * value, step) >= best[:2]):
            best = (sign * value, step, checkpoint)
    return best[2] if best else None


def prune(run_dir: Path, keep: int, metric: str | None) -> None:
    """Keep the newest checkpoints and the best one, which the link `best` names; the first rank calls it."""
    best = best_of(run_dir, metric)
    saved = checkpoints(run_dir)
    if best is not None:
        link, new = best.with_name(BEST), best.with_name(f".partial-{BEST}")
        with contextlib.suppress(OSError):  # a file system without links; the log names the best one too
            new.unlink(missing_ok=True)
            if not link.is_symlink() and link.is_dir():  # of a run folder that was copied with what links point to
                _remove_own([link])
            new.symlink_to(best.name, target_is_directory=True)
            os.replace(new, link)
    _remove_own(old for old in saved[: len(saved) - keep] if old != best)


def _remove_own(folders: Iterable[Path]) -> None:
    """Take checkpoints away that hold what was written with them and nothing else, and that nobody reads.

    A folder with somebody's notes stays, and one that is being read stays until the next save.
    """
    for folder in folders:
        with unheld(folder / STATE) as unread:
            if unread and not integrity.strangers(folder):
                integrity.remove([folder])
