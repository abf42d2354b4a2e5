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
from typing import TYPE_CHECKING

from zoo.checkpoint.selection import is_reward_model
from zoo.config.layers.layer import Overrides, combined
from zoo.config.locate import locate
from zoo.config.schema import Recipe
from zoo.data.errors import RowError
from zoo.data.sources.mixture import SampleId
from zoo.data.sources.rows import Row
from zoo.errors import UserError
from zoo.files import expanded
from zoo.launch.launcher import run_task
from zoo.launch.prepare import world_size
from zoo.logging.result import Model, run_of
from zoo.model import build
from zoo.parallel.process_state import preserve_process_state
from zoo.tools.asking import AskedRows, asked, check_counts, open_asked
from zoo.tools.serving.client import Client, Prompt, RefusedError
from zoo.tools.serving.folder import ADAPTER, ServedFolder
from zoo.tools.serving.requests import UnsendableRowError, chat_request
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


@dataclass(frozen=True)
class ServedVerification:
    """The result of :func:`verify_served`.

    Attributes:
        server: what was asked: its address or program, and its version.
        limit: largest difference of a log-probability that passes; their mean may be a tenth of it.
        quantity: what is compared: log-probabilities, or the scores of a reward model.
        rows: one dict a row, with `source`, and either `skipped` (why a request can't express it), `refused` (the server's words),
            `ids_differ` (where ids differ first: `position`, and token id and text, or None behind the end, of both sides) or
            `differences` (the server's log-probability minus zoo's at each label) and `worst` (`position`, `token`, `zoo`, `server`).
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

    def rows_with(self, key: str) -> list[JsonObject]:
        """The rows that have a key: skipped, refused, ids_differ or differences."""
        return [row for row in self.rows if key in row]

    @property
    def equal(self) -> bool:
        """Whether the server takes each row that a request can express, with the same ids, and differs by no more than the limit."""
        if self.rows_with("refused") or self.rows_with("ids_differ") or not self.rows_with("differences"):
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
        served: vLLM's program, by name or path, or the address of a running server ("http://localhost:8000").
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
    with asked(path, rows, overrides, rewards=rewards) as recipe:
        most = max_rows or recipe.train.eval_rows or None
        options, ranks = {"max_rows": most}, world_size(recipe)
        scores = run_task("zoo.tools.score:score_here", recipe, ranks, options, fresh=not in_process)
        processor = build.assemble(recipe).processor
        pairs = list(_with_rows(recipe, processor, scores, most))
        longest = max((len(score["token_ids"]) for score in scores), default=0)
        with server.connect(folder, longest) as client:
            # vLLM 0.32 on a CPU fails on two requests with adapters that ask for log-probabilities of prompts at the same time.
            at_once = _AT_ONCE if folder.adapter is None else 1
            compared = _ask_all(partial(_compare, client, processor, rewards), pairs, at_once)
            name = " ".join(filter(None, (served, client.version())))
    quantity = "scores" if rewards else "log-probabilities"
    return ServedVerification(name, _limit(folder) if limit is None else limit, quantity, compared)


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


def _ask_all(
    compare: Callable[[Row, JsonObject], JsonObject], pairs: Sequence[tuple[Row, JsonObject]], at_once: int
) -> list[JsonObject]:
    """What becomes of each row, so many at once."""
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(compare, row, score) for row, score in pairs]
        try:
            compared = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    refused = [row["refused"] for row in compared if "refused" in row]
    if refused and not any("ids_differ" in row or "differences" in row for row in compared):
        raise UserError(f"the server takes none of the rows: {refused[0]}")
    return compared


def _compare(client: Client, processor: Processor, rewards: bool, row: Row, score: JsonObject) -> JsonObject:
    """A row's result, as `ServedVerification.rows` has it."""
    try:
        if rewards:
            return {"source": row.source, "kind": row.kind, **_compare_reward(client, processor, row, score)}
        if row.text is not None:
            prompt = client.text_prompt(row.text)
        else:
            prompt = client.chat_prompt(chat_request(row, thoughts=processor.wants_thoughts))
    except UnsendableRowError as error:
        return {"source": row.source, "skipped": str(error)}
    except RefusedError as error:
        return {"source": row.source, "refused": str(error)}
    except RowError as error:
        raise error.at(row.source) from error
    result = {"source": row.source, "kind": row.kind, "labels": sum(label != -100 for label in score["labels"])}
    position = first_difference(score["token_ids"], prompt.token_ids)
    if position is not None:
        sides = (score["token_ids"], prompt.token_ids)
        ids = [side[position] if position < len(side) else None for side in sides]
        texts = [None if token is None else processor.tokenizer.decode([token]) for token in ids]
        where = {"position": position, "zoo": ids[0], "server": ids[1], "zoo_text": texts[0], "server_text": texts[1]}
        return result | {"ids_differ": where | {"zoo_length": len(sides[0]), "server_length": len(sides[1])}}
    return result | _differences(score, prompt, processor)


def _compare_reward(client: Client, processor: Processor, row: Row, score: JsonObject) -> JsonObject:
    """The same of a reward model's row: its one number stands at its last token. Servers tell the number of tokens alone."""
    if row.text is not None:
        raise UnsendableRowError("a plain text is no conversation, which a reward model reads")
    value, tokens = client.reward(chat_request(row, thoughts=processor.wants_thoughts))
    length = len(score["token_ids"])
    if tokens != length:
        ids = {"zoo": None, "server": None, "zoo_text": None, "server_text": None}
        lengths = {"zoo_length": length, "server_length": tokens}
        return {"labels": 1, "ids_differ": {"position": min(length, tokens), **ids, **lengths}}
    own = score["logprobs"][-1]
    token = processor.tokenizer.decode(score["token_ids"][-1:])
    worst = {"position": length - 1, "token": token, "zoo": own, "server": value}
    return {"labels": 1, "differences": [value - own], "worst": worst}


def first_difference(ids: Sequence[int], served: Sequence[int]) -> int | None:
    """The first position at which a server's ids are others than zoo's; None where they are the same.

    zoo's may end with one token more: the end of the last turn or text, where the chat template writes none.
    """
    same = [x == y for x, y in zip(ids, served, strict=False)]
    if not all(same):
        return same.index(False)
    return None if len(ids) - len(served) in (0, 1) else len(same)


def _differences(score: JsonObject, prompt: Prompt, processor: Processor) -> JsonObject:
    length = len(prompt.token_ids)
    labelled = [number for number, label in enumerate(score["labels"][:length]) if label != -100]
    differences = [prompt.logprobs[number] - score["logprobs"][number] for number in labelled]
    if not labelled:
        return {"differences": [], "worst": None}
    largest = max(range(len(labelled)), key=lambda index: abs(differences[index]))
    position = labelled[largest]
    worst = {"position": position, "token": processor.tokenizer.decode([score["token_ids"][position]])}
    worst |= {"zoo": score["logprobs"][position], "server": prompt.logprobs[position]}
    return {"differences": differences, "worst": worst}
