"""Loss, and scores of greedy answers, of a checkpoint on some rows; `zoo.evaluate`.

The loss is that of an evaluation while training; the answers are those of `zoo.generate`. Both under any parallel layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zoo.checkpoint import initial_weights
from zoo.checkpoint.selection import is_embedding_model
from zoo.config.layers.layer import Overrides
from zoo.config.locate import locate
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.data.loading.sample_source import SampleSource
from zoo.data.sources.formats.tags import plain
from zoo.data.sources.mixture import SampleId
from zoo.data.sources.rows import Row
from zoo.errors import UserError
from zoo.generation.generator import Generator, gather_rows, load_generator
from zoo.generation.sampling import Sampling
from zoo.generation.scores.answer_scores import Score
from zoo.generation.scores.choose import Scores
from zoo.launch.launcher import run_task
from zoo.launch.prepare import world_size
from zoo.logging.result import Model, run_of
from zoo.model import build
from zoo.parallel.process_state import preserve_process_state
from zoo.parallel.world import open_world
from zoo.tools.asking import AskedRows, asked, check_counts, open_asked, say_left_out
from zoo.tools.out_file import KeptRows, out_file
from zoo.training.evaluation import batch_sums, recipe_batches
from zoo.training.passes.retrieval import rank_rows
from zoo.types import JsonMapping, JsonObject


@dataclass(frozen=True)
class Evaluation:
    """The result of :func:`evaluate`.

    Each of `predictions`, of an embedding model, is of a distinct query, with `source`, `kind`, `nearest` (where the row of the nearest
    candidate stands) and `scores`. Else each, in the order of the rows, has `source`, `kind`, `task`, `prompt`, `answer` (None: plain text), `answers`,
    `prediction`, `finish`, `scores` and `loss` (mean over its labels).
    """

    rows: int  # how many were evaluated
    loss: float  # mean over labels by their weights, in nats; as evaluations while training have it
    scores: dict[str, float]  # by name, over the rows that have the score
    by_kind: dict[str, dict[str, float]]  # of each kind of row: `rows`, `loss` and its scores
    predictions: list[JsonObject] = field(default_factory=list)  # of each row


@preserve_process_state()
def evaluate(
    path: Model,
    rows: AskedRows = None,
    overrides: Overrides = (),
    *,
    metrics: str | Sequence[str] = (),
    max_new_tokens: int = 256,
    batch: int = 16,
    max_rows: int | None = None,
    out: str | Path | None = None,
    in_process: bool = False,
) -> Evaluation:
    """Evaluate a checkpoint on rows with answers, in separate processes.

    Args:
        path: a Hugging Face folder or hub id, zoo's own weights, the folder or checkpoint of a run, or what names a run: its `TrainResult`,
            recipe, or recipe's name or file (adapters included).
        rows: a file or folder, a bundled set ("digits:heldout"), an entry as data.train takes it, a list of these, or rows as
            dicts, a datasets.Dataset or a pandas DataFrame. None: those that the run held out.
        overrides: of the recipe, such as `parallel.tp=2`, `packing.budget=16384` or `data.on_error=skip`; or as a dict.
        metrics: names of scores, a list or separated by commas: exact_match, accuracy, anls, wer, cer, entry points of the group `zoo.scores`, or
            `module:function` of (prediction, answers) -> number or (total, weight). None: by each row's task or media.
        max_new_tokens: most tokens of an answer.
        batch: most prompts that are answered at once.
        max_rows: the first so many rows only.
        out: a file to write the predictions to, one JSON object a line; a failed call leaves the former file, and says where rows are
            that were done.
        in_process: a single rank runs in this process, as in the command `zoo eval`.

    Raises:
        UserError: no such checkpoint, file or score, an override that can't run, or a bad row (under data.on_error=raise).
    """
    names = metrics.split(",") if isinstance(metrics, str) else metrics
    scores = Scores.named([name.strip() for name in names if name.strip()])
    sampling = Sampling(max_new_tokens)
    check_counts(batch=batch, max_rows=max_rows)
    with (
        out_file(out) as file,
        asked(path, rows, overrides, loss="embed" if is_embedding_model(locate(run_of(path))) else "nll") as recipe,
    ):
        most = max_rows or recipe.train.eval_rows or None
        if recipe.train.embeds:
            if names:
                raise UserError(
                    f"metrics={','.join(names)}: they are of answers, and an embedding model gives none; leave them out"
                )
            task, limits = "zoo.tools.evaluate:rank_here", {"max_rows": most}
            evaluation = Evaluation(**run_task(task, recipe, world_size(recipe), limits, fresh=not in_process))
            file.write(evaluation.predictions)
            return evaluation
        options: JsonObject = {"max_new_tokens": sampling.max_new_tokens, "batch": batch, "max_rows": most}
        options["kept"] = file.kept and str(file.kept)
        task = "zoo.tools.evaluate:evaluate_here"
        evaluation = summed(run_task(task, recipe, world_size(recipe), options, fresh=not in_process), scores)
        file.write(evaluation.predictions)
        return evaluation


def rank_here(recipe: Recipe, options: JsonMapping) -> JsonObject:
    """The fields of an `Evaluation` of the rows of data.eval, on this rank, as `zoo.training.passes.retrieval.rank_rows` gives them."""
    with open_world(recipe) as world:
        recipe = validate(recipe, world.size)
        assembly = build.assemble(recipe)
        chunks = initial_weights.load_frozen(assembly, recipe, world)
        step = build.build_step(assembly, recipe, world)
        source = open_asked(recipe, assembly.processor, options["max_rows"])
        batches = recipe_batches(recipe, source, world)
        metrics, predictions = rank_rows(step, chunks, batches, world, batches.filler)
        say_left_out(source, world)
        own = {name: metrics.pop(name) for name in ("rows", "loss", "by_kind")}
        return {**own, "scores": metrics, "predictions": predictions}


def evaluate_here(recipe: Recipe, options: JsonMapping) -> list[JsonObject]:
    """`evaluate` on this rank, without scores: each row's sums and answer, on every rank."""
    with load_generator(recipe, Sampling(options["max_new_tokens"]), options["batch"]) as generator:
        recipe, assembly = generator.decoding.recipe, generator.decoding.assembly
        source = open_asked(recipe, assembly.processor, options["max_rows"])
        losses = _losses(generator, source)
        rows = {number: source.rows.row(SampleId(number)) for number in losses}
        asked = [number for number, row in rows.items() if row.text is None]
        kept = KeptRows(options.get("kept"), generator.decoding.world)
        predictions = generator.all(source.rows, asked, keep=kept.add if kept.wanted else None) if asked else {}
        say_left_out(source, generator.decoding.world)
        return [_of_row(rows[number], losses[number], predictions.get(number)) for number in losses]


def _losses(generator: Generator, source: SampleSource) -> dict[int, list[float]]:
    """Row number -> its negative log likelihood, weight, labels and right labels, of all ranks."""
    decoding = generator.decoding
    recipe, world = decoding.recipe, decoding.world
    batches = recipe_batches(recipe, source, world)
    step = build.build_step(decoding.assembly, recipe, world)
    local_losses: dict[int, list[float]] = {}
    for numbers, batch in zip(batches.bins, batches, strict=True):
        _, table = batch_sums(step, decoding.chunks, batch, world, batches.filler)
        local_losses |= dict(zip(numbers, map(list, table), strict=True)) if table else {}
    return gather_rows(local_losses, world)


def _of_row(row: Row, losses: Sequence[float], prediction: JsonMapping | None) -> JsonObject:
    asked = row.messages[:-1] if row.messages and row.messages[-1].role == "assistant" else row.messages
    answer = prediction["reference"] if prediction else None
    single = len(asked) == 1
    turns = "\n".join(text if single else f"{role}: {text}" for role, text in asked)
    return {
        "source": row.source, "kind": row.kind, "task": row.task, "media": sorted(row.media),
        "prompt": row.text or plain(turns), "answer": answer,
        "answers": list(row.answers) or ([] if answer is None else [answer]),
        "prediction": prediction["text"] if prediction else None, "finish": prediction["finish"] if prediction else None,
        "loss": losses[0] / (losses[1] or 1.0), "loss_weight": losses[1],
    }  # fmt: skip


def summed(rows: Sequence[JsonMapping], scores: Scores) -> Evaluation:
    """The scores of rows, and their sums over all rows and by kind."""
    tables: dict[str | None, dict[str, list[float]]] = {None: {}}  # None: all rows
    counts: dict[str | None, int] = {None: 0}
    predictions = []
    for row in rows:
        parts = {"loss": Score(row["loss"] * row["loss_weight"], row["loss_weight"])}
        totals: dict[str, Score] = {}
        if row["answer"] is not None:
            totals = scores.of_row(row["prediction"], row["answers"], row["task"], row["media"])
        for kind in (None, row["kind"] or "row"):
            counts[kind] = counts.get(kind, 0) + 1
            table = tables.setdefault(kind, {})
            for name, (total, weight) in (parts | totals).items():
                running = table.setdefault(name, [0.0, 0.0])
                table[name] = [running[0] + total, running[1] + weight]
        predictions.append({**row, "scores": {name: score.value for name, score in totals.items()}})
    means: dict[str | None, dict[str, float]] = {
        kind: {name: total / (weight or 1.0) for name, (total, weight) in table.items()}
        for kind, table in tables.items()
    }
    total, loss = counts.pop(None), means[None].pop("loss", 0.0)
    by_kind = {kind: {"rows": counts[kind], **means[kind]} for kind in sorted(filter(None, counts))}
    return Evaluation(total, loss, means[None], by_kind, predictions)
