"""Served equals trained: what a server makes of rows, compared with zoo's own model; `zoo.verify_served`.

The server gets each row as a client would send it: chat messages, its answers included, with media as data URLs. It returns the
token ids that it reads and the log-probability of each. Ids must be those of zoo's sample; the log-probabilities of labels may differ
by what the server's dtype allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.checkpoint.selection import is_reward_model
from zoo.config.entries import MediaLimits
from zoo.config.layers.layer import Overrides, combined
from zoo.config.locate import locate
from zoo.config.schema import Recipe
from zoo.data.errors import RowError
from zoo.data.sources.mixture import SampleId
from zoo.data.sources.rows import Row
from zoo.errors import UserError
from zoo.files import expanded
from zoo.generation.sampling import Sampling
from zoo.launch.launcher import run_task
from zoo.launch.prepare import world_size
from zoo.logging.result import Model, run_of
from zoo.model import build
from zoo.parallel.process_state import preserve_process_state
from zoo.tools.asking import AskedRows, asked, check_counts, open_asked
from zoo.tools.serving.client import RefusedError
from zoo.tools.serving.folder import ADAPTER, ServedFolder
from zoo.tools.serving.requests import UnsendableRowError, read_otherwise
from zoo.tools.serving.row_comparison import MOST_NEW, compare_answer, compare_prompt, compare_reward
from zoo.tools.serving.server import START_SECONDS, Server
from zoo.types import JsonObject

if TYPE_CHECKING:
    from zoo.data.processors.processor import Processor

# dtype that is served -> largest difference of a log-probability that passes
LIMITS = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
QUANTISED_LIMIT = 1.0
MEAN_SHARE = 0.1  # of the limit, which the mean of all differences may be
PERCENTILES = (50, 90, 99)
_AT_ONCE = 8  # requests

type RowComparison = Callable[[Row, JsonObject], JsonObject]


@dataclass(frozen=True)
class ServedVerification:
    """The result of :func:`verify_served`.

    Attributes:
        server: what was asked: its address or program, and its version.
        limit: largest difference of a log-probability that passes; their mean may be a tenth of it.
        quantity: what is compared: log-probabilities; scores, of a reward model; or greedy answers, where a server has no
            log-probabilities of prompts.
        rows: one dict a row, with `source`, and either `skipped` (why a request can't express it), `refused` (the server's words),
            `ids_differ` (where ids differ first: `position`, and token id and text, or None behind the end, of both sides) or
            `differences` (the server's log-probability minus zoo's at each label) and `worst` (`position`, `token`, `zoo`, `server`),
            or `answers` (the texts of `zoo` and `server`). Rows that differ may have `read_otherwise`: what their images have that
            servers read in ways of their own.
    """

    server: str
    limit: float
    quantity: str
    rows: list[JsonObject] = field(default_factory=list)

    @property
    def differences(self) -> list[float]:
        """The size of each label's difference, in ascending order."""
        return sorted(abs(value) for row in self.rows for value in row.get("differences", ()))

    @property
    def mean_difference(self) -> float:
        """The mean of all differences; 0 without labels."""
        return math.fsum(self.differences) / max(len(self.differences), 1)

    @property
    def largest_difference(self) -> float:
        """The largest difference; 0 without labels."""
        return max(self.differences, default=0.0)

    @property
    def percentiles(self) -> dict[int, float]:
        """The differences that so many percent of the labels don't exceed."""
        values = self.differences or [0.0]
        return {percent: values[math.ceil(percent / 100 * len(values)) - 1] for percent in PERCENTILES}

    @property
    def worst_row(self) -> JsonObject | None:
        """The row with the largest difference."""
        compared = [row for row in self.rows if row.get("differences")]
        return max(compared, key=lambda row: max(map(abs, row["differences"])), default=None)

    @property
    def rows_over_limit(self) -> list[JsonObject]:
        """The rows with a difference above the limit, in their order."""
        return [row for row in self.rows if any(abs(value) > self.limit for value in row.get("differences", ()))]

    def rows_with(self, key: str) -> list[JsonObject]:
        """The rows that have a key: skipped, refused, ids_differ, differences or answers."""
        return [row for row in self.rows if key in row]

    @property
    def equal(self) -> bool:
        """Whether the server takes each row that a request can express, with the same ids, and differs by no more than the limit."""
        answers = [row["answers"] for row in self.rows_with("answers")]
        if self.rows_with("refused") or self.rows_with("ids_differ") or not (self.rows_with("differences") or answers):
            return False
        if any(answer["zoo"] != answer["server"] for answer in answers):
            return False
        return self.largest_difference <= self.limit and self.mean_difference <= self.limit * MEAN_SHARE

    def as_dict(self) -> JsonObject:
        """The result as plain values."""
        summary: JsonObject = {
            "equal": self.equal,
            "labels": len(self.differences),
            "mean_difference": self.mean_difference,
        }
        summary |= {"largest_difference": self.largest_difference, "percentiles": self.percentiles}
        return summary | asdict(self)


@preserve_process_state()
def verify_served(
    model: Model,
    export: str | Path | None = None,
    *,
    served: str = "vllm",
    rows: AskedRows = None,
    overrides: Overrides = (),
    limit: float | None = None,
    max_rows: int | None = None,
    served_model: str | None = None,
    server_args: Sequence[str] = (),
    server_log: str | Path | None = None,
    server_seconds: float = START_SECONDS,
    in_process: bool = False,
    quiet: bool = True,
) -> ServedVerification:
    """Compare what a server makes of rows with what zoo's own model does: log-probabilities, or a reward model's scores.

    Args:
        model: a checkpoint, as `zoo.score` takes it, whose log-probabilities zoo computes; or a reward model, whose scores it computes.
        export: the folder that is served: a whole model, or a run's adapters; None: `model` itself, of a run its `export/`.
        served: vLLM's program, by name or path, or the address of a running server ("http://localhost:8000"); or the program
            transformers, whose server has no log-probabilities of prompts, so that greedy answers are compared.
        rows: as `zoo.score` takes them.
        overrides: of the recipe under which zoo computes, such as `packing.mode=none`.
        limit: largest difference of a log-probability that passes, in nats; their mean may be a tenth. None: 1e-3 where the export is
            stored in fp32, 0.1 in fp16, 0.5 in bf16, 1 in FP8.
        max_rows: the first so many rows only.
        served_model: what a running server calls the model; None: it has one alone.
        server_args: further arguments of `vllm serve`.
        server_log: the file for the server's log; None: one in the temporary folder, which stays.
        server_seconds: longest wait until the server answers.
        in_process: a single rank computes in this process, which keeps memory of a GPU that a server on it needs.
        quiet: nothing is said on stderr of the server's start.

    Raises:
        UserError: no such checkpoint, export, program or server; a server that fails, that takes no row, or that gives no
            log-probabilities of prompts; or whatever `zoo.score` raises.
    """
    check_counts(max_rows=max_rows)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0):
        raise UserError(f"limit={limit!r}: wanted a number from 0, such as 1e-3")
    path, folder = _sides(model, export)
    log = None if server_log is None else expanded(server_log)
    server = Server(served, served_model, tuple(server_args), log, server_seconds, quiet)
    server.check()
    if folder.dtype == "float32":
        overrides = combined(["engine.precision=fp32"], overrides)
    rewards = is_reward_model(locate(path))
    if rewards and folder.adapter is not None:
        raise UserError(f"{path}: vLLM reads no head out of adapters; serve them merged: zoo convert {path} OUT")
    with asked(path, rows, overrides, loss="reward" if rewards else "nll") as recipe:
        most = max_rows or recipe.train.eval_rows or None
        compute = _answers if server.only_answers else _scores
        results: list[JsonObject] = compute(recipe, most, in_process)
        processor = build.assemble(recipe).processor
        pairs = list(_with_rows(recipe, processor, results, most))
        longest = max((len(result["token_ids"]) for result in results), default=0)
        options = processor.options_of_servers(MediaLimits.from_data(recipe.data))
        with server.connect(folder, longest, options) as client:
            # vLLM 0.32 on a CPU fails on two requests with adapters that ask for log-probabilities of prompts at the same time.
            at_once = _AT_ONCE if folder.adapter is None else 1
            compare = compare_answer if server.only_answers else compare_reward if rewards else compare_prompt
            compared = _ask_all(partial(compare, client, processor), pairs, at_once)
            name = " ".join(filter(None, (served, client.version())))
    allowed = _limit(folder) if limit is None else limit
    for (row, _), result in zip(pairs, compared, strict=True):
        if _differs(result, allowed) and (oddities := read_otherwise(row)):
            result["read_otherwise"] = oddities
    quantity = "greedy answers" if server.only_answers else "scores" if rewards else "log-probabilities"
    return ServedVerification(name, allowed, quantity, compared)


def _differs(result: JsonObject, limit: float) -> bool:
    answers = result.get("answers", {"zoo": "", "server": ""})
    over = any(abs(value) > limit for value in result.get("differences", ()))
    return over or "ids_differ" in result or answers["zoo"] != answers["server"]


def _scores(recipe: Recipe, most: int | None, in_process: bool) -> Any:
    """`zoo.score` of the recipe's rows."""
    options = {"max_rows": most}
    return run_task("zoo.tools.score:score_here", recipe, world_size(recipe), options, fresh=not in_process)


def _answers(recipe: Recipe, most: int | None, in_process: bool) -> Any:
    """Greedy answers in the place of the rows' last ones."""
    options: JsonObject = {"sampling": asdict(Sampling(MOST_NEW)), "batch": 16, "unanswered": [], "max_rows": most}
    return run_task("zoo.tools.generate:generate_here", recipe, world_size(recipe), options, fresh=not in_process)


def _sides(model: Model, export: str | Path | None) -> tuple[str, ServedFolder]:
    """What zoo computes with, and what is served."""
    path = run_of(model)
    folder = ServedFolder.from_path(str(path if export is None else export))
    if export is None and (expanded(path) / ADAPTER).is_file():  # of a run, which stands for it and its base
        run = expanded(path).absolute().parent
        if not (run / "checkpoints").is_dir():
            raise UserError(
                f"{path}: adapters, without the run that they are of; name both: zoo verify RUN {path} served=vllm"
            )
        return str(run), folder
    return path, folder


def _limit(folder: ServedFolder) -> float:
    return QUANTISED_LIMIT if folder.is_quantised else LIMITS.get(folder.dtype, LIMITS["bfloat16"])


def _with_rows(
    recipe: Recipe, processor: Processor, scored: Sequence[JsonObject], most: int | None
) -> Iterator[tuple[Row, JsonObject]]:
    """Each score with the row that it is of."""
    source = open_asked(recipe, processor, most)
    left = iter(scored)
    score = next(left, None)
    for number in map(SampleId, range(len(source.rows))):
        if score is not None and source.rows.name(number) == score["source"]:
            yield source.rows.row(number), score
            score = next(left, None)


def _ask_all(compare: RowComparison, pairs: Sequence[tuple[Row, JsonObject]], at_once: int) -> list[JsonObject]:
    """What becomes of each row, so many at once."""
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(_result, compare, row, own) for row, own in pairs]
        try:
            compared = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    refused = [row["refused"] for row in compared if "refused" in row]
    if refused and not any({"ids_differ", "differences", "answers"} & row.keys() for row in compared):
        raise UserError(f"the server takes none of the rows: {refused[0]}")
    return compared


def _result(compare: RowComparison, row: Row, own: JsonObject) -> JsonObject:
    """A row's result, as `ServedVerification.rows` has it."""
    result: JsonObject = {"source": row.source, "kind": row.kind}
    try:
        return result | compare(row, own)
    except UnsendableRowError as error:
        return result | {"skipped": str(error)}
    except RefusedError as error:
        return result | {"refused": str(error)}
    except RowError as error:
        raise error.at(row.source) from error
