"""`zoo report`: one self-contained HTML page about one run, or several compared."""

from __future__ import annotations

import base64
import datetime
import json
import statistics
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from zoo.engine.report.progress_line import clock
from zoo.errors import UserError
from zoo.files import write_atomically
from zoo.runs.charts import COLOURS, Line, chart, lines_of, number
from zoo.runs.history import Run, differences, read_run

MOST_RUNS = len(COLOURS)
_LISTED = 200  # events, rows of predictions
_STEP_CHARTS = {  # metric of a training step -> title, unit
    "tokens_per_second": ("Speed", "real tokens a second, all ranks"),
    "step_ms": ("Time of a step", "ms"),
    "data_wait": ("Waiting for data", "share of a step"),
    "grad_norm": ("Gradient norm", ""),
    "lr": ("Learning rate", ""),
    "pad_fraction": ("Padding", "share of a row"),
}
_OTHER_TITLES = {
    "mtp_loss": "Loss of multi-token prediction",
    "moe_load_balancing_loss": "Load balancing loss",
}
_NOT_DRAWN = {"loss", "real_tokens", "labels", "data_ms", *_STEP_CHARTS}
_EVENTS = (
    "start",
    "resume",
    "end",
    "skip",
    "new_level",
    "changed",
    "damaged_checkpoint",
    "damaged_file",
    "export",
)


def report(runs: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write a page about runs, finished or not, and return its path.

    Args:
        runs: run folders; up to 8.
        out: the file; default: report.html in the first run's folder.

    Raises:
        UserError: a folder holds no run, or there are too many.
    """
    folders = [runs] if isinstance(runs, (str, Path)) else list(runs)
    if not 1 <= len(folders) <= MOST_RUNS:
        raise UserError(f"zoo report takes 1 to {MOST_RUNS} run folders, not {len(folders)}")
    found = [read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    path = Path(out) if out is not None else found[0].folder / "report.html"
    if path.suffix not in (".html", ".htm"):
        raise UserError(f"out={path}: wanted the name of an HTML file, such as out=report.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(found))
    return path


def _names(folders: Sequence[str | Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    paths = [Path(folder).resolve() for folder in folders]
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def page(runs: Sequence[Run]) -> str:
    """The page as text."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: " + ", ".join(run.name for run in runs)
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    script = resources.files("zoo.runs").joinpath("page.js").read_text(encoding="utf-8")
    style = resources.files("zoo.runs").joinpath("page.css").read_text(encoding="utf-8")
    parts = [
        f"<h1>{escape(title)}</h1><p class='quiet'>zoo report, {now}</p>",
        _overview(runs),
        _section("Loss and scores", _grid([_losses(runs), *_scores(runs)])),
        _predictions(runs),
        _section("Training steps", _grid(_step_charts(runs, _STEP_CHARTS, zero=True))),
        _section("Further metrics", _grid(_step_charts(runs, _further(runs)))),
        _data(runs),
        _recipe(runs),
        _events(runs),
        _environment(runs),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head>'
        f"<body>{''.join(parts)}<script>{script}</script></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


def _grid(charts: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>' if any(charts) else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1) -> str:
    """Cells are HTML; the first `text` columns are set flush left."""

    def cells(values: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=text' if index < text else ''}>{value}</{tag}>"
            for index, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells(head, "th")}</tr>{body}</table></div>'


def _overview(runs: Sequence[Run]) -> str:
    rows: dict[str, Callable[[Run], str]] = {
        "state": lambda run: escape(run.status.state + (f": {run.status.why}" if run.status.why else "")),
        "recipe": lambda run: escape(" ".join(str(run.recipe.get(key) or "") for key in ("recipe", "size"))),
        "steps": lambda run: f"{run.status.step:,} of {run.status.total_steps or '?'}",
        "loss": lambda run: _digits(run.status.mean_loss),
        "held-out loss": lambda run: _digits((run.status.eval or {}).get("loss")),
        "exact match": lambda run: _percent((run.status.eval or {}).get("exact_match")),
        "best exact match": _best,
        "real tokens/s": lambda run: _median(run, "tokens_per_second"),
        "waiting for data": lambda run: _percent(_middle(run, "data_wait")),
        "time": lambda run: "" if run.seconds is None else clock(run.seconds),
        "starts": lambda run: str(run.status.starts),
        "steps not applied": lambda run: str(run.status.skipped_steps),
        "rows left out": lambda run: f"{sum(run.status.bad_rows.values()):,}",
    }
    head = ["", *(_key(runs, run) + escape(run.name) for run in runs)]
    return _table(head, [[name, *map(cell, runs)] for name, cell in rows.items()], text=len(head))


def _key(runs: Sequence[Run], run: Run) -> str:
    return f'<i class="key" style="background:{COLOURS[list(runs).index(run)]}"></i>' if len(runs) > 1 else ""


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _middle(run: Run, metric: str) -> float | None:
    """The median over all steps but the first, which compiles kernels and fills caches."""
    values = run.metrics[metric].values if metric in run.metrics else ()
    return statistics.median(values[1:] if len(values) > 1 else values) if len(values) else None


def _median(run: Run, metric: str) -> str:
    value = _middle(run, metric)
    return "" if value is None else f"{value:,.0f}"


def _best(run: Run) -> str:
    scored = [record for record in run.evaluations if isinstance(record.get("exact_match"), (int, float))]
    if not scored:
        return ""
    best = max(scored, key=lambda record: record["exact_match"])
    return f"{best['exact_match']:.1%} at step {best['step']:,}"


def _losses(runs: Sequence[Run]) -> str:
    lines: list[Line] = []
    for index, run in enumerate(runs):
        held_out = _points(run, "loss")
        alone = len(runs) == 1
        if "loss" in run.metrics:
            lines += lines_of("training" if alone else run.name, run.metrics["loss"], COLOURS[index])
        if held_out:
            name = "held out" if alone else f"{run.name}, held out"
            lines.append(Line(name, held_out, COLOURS[1] if alone else COLOURS[index], dots=True))
    return chart("Loss", lines, unit="nats a label")


def _points(run: Run, *keys: str) -> list[tuple[float, float]]:
    """A number of each evaluation by step, at the end of a path of keys."""
    found = []
    for record in run.evaluations:
        value: Any = record
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, (int, float)):
            found.append((float(record["step"]), float(value)))
    return found


def _scores(runs: Sequence[Run]) -> list[str]:
    """Exact match of all rows by run, and of each kind of row."""
    kinds = sorted(
        {kind for run in runs for record in run.evaluations for kind in record.get("by_kind") or {}}
    )
    if len(runs) == 1:
        lines = [Line("all", _points(runs[0], "exact_match"), "#1d2433", dots=True)]
        for index, kind in enumerate(kinds[: len(COLOURS)]):
            lines.append(
                Line(kind, _points(runs[0], "by_kind", kind, "exact_match"), COLOURS[index], dots=True)
            )
        return [chart("Exact match on held-out rows", lines, share=True)]
    charts = []
    for kind in (None, *kinds):
        keys = ("exact_match",) if kind is None else ("by_kind", kind, "exact_match")
        lines = [Line(run.name, _points(run, *keys), COLOURS[i], dots=True) for i, run in enumerate(runs)]
        charts.append(chart(f"Exact match, {kind or 'all held-out rows'}", lines, share=True))
    return charts


def _step_charts(runs: Sequence[Run], charts: dict[str, tuple[str, str]], zero: bool = False) -> list[str]:
    return [
        chart(
            title,
            [
                line
                for index, run in enumerate(runs)
                if metric in run.metrics
                for line in lines_of(run.name, run.metrics[metric], COLOURS[index], smooth=metric != "lr")
            ],
            unit=unit,
            zero=zero,
        )
        for metric, (title, unit) in charts.items()
    ]


def _further(runs: Sequence[Run]) -> dict[str, tuple[str, str]]:
    """Metrics of steps that have no chart of their own, whatever they are."""
    names = dict.fromkeys(name for run in runs for name in run.metrics if name not in _NOT_DRAWN)
    return {name: (_OTHER_TITLES.get(name, name), "") for name in names}


def _predictions(runs: Sequence[Run]) -> str:
    """The picture of the last predictions, as the run drew it."""
    parts = []
    for run in runs:
        picture = run.folder / "plots" / "predictions.png"
        if picture.is_file():
            data = base64.b64encode(picture.read_bytes()).decode("ascii")
            name = f"<h3>{_key(runs, run)}{escape(run.name)}</h3>" if len(runs) > 1 else ""
            parts.append(
                f'{name}<img alt="predictions of {escape(run.name)}" src="data:image/png;base64,{data}">'
            )
    return _section("Predictions on held-out rows", "".join(parts))


def _data(runs: Sequence[Run]) -> str:
    """The entries of each mixture, the held-out rows by kind, and the rows that were left out."""
    rows = []
    for run in runs:
        trained = escape(", ".join(map(_plain, _listed(run.recipe.get("data.train")))))
        last = run.evaluations[-1] if run.evaluations else {}
        kinds = ", ".join(
            f"{found.get('rows')} {kind}" for kind, found in (last.get("by_kind") or {}).items()
        )
        held_out = escape(", ".join(map(_plain, _listed(last.get("data")))) + (f": {kinds}" if kinds else ""))
        left_out = ", ".join(f"{count:,} {cause}" for cause, count in run.status.bad_rows.items()) or "none"
        tokens = run.metrics["real_tokens"].values if "real_tokens" in run.metrics else ()
        labels = run.metrics["labels"].values if "labels" in run.metrics else ()
        share = f"{sum(labels) / sum(tokens):.1%}" if tokens and sum(tokens) else ""
        name = _key(runs, run) + escape(run.name)
        rows.append([name, trained, held_out, number(sum(tokens)), share, escape(left_out)])
    head = ["run", "trains on", "evaluates on", "real tokens", "tokens with loss", "rows left out"]
    return _section("Data", _table(head, rows, text=3))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _recipe(runs: Sequence[Run]) -> str:
    """The keys in which runs differ; of a single run, those that its user and recipe set."""
    if len(runs) > 1:
        found = differences(runs)
        if not found:
            return _section("Recipes", "<p>The recipes are the same.</p>")
        head = ["key", *(_key(runs, run) + escape(run.name) for run in runs)]
        rows = [[escape(key), *(escape(_short(value)) for value in values)] for key, values in found.items()]
        return _section("Recipes: the keys that differ", _table(head, rows, text=len(head)))
    rows = [[escape(key), escape(_short(value))] for key, value in _set_keys(runs[0]).items()]
    body = _table(["key", "value"], rows, text=2) if rows else ""
    return _section("Recipe: what differs from the defaults", body)


def _short(value: Any) -> str:
    text = _plain(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _set_keys(run: Run) -> dict[str, Any]:
    from zoo.config.layers.keys import keys
    from zoo.config.schema import Recipe

    defaults = {entry.key: entry.default for entry in keys(Recipe).values()}
    return {
        key: value
        for key, value in run.recipe.items()
        if key not in defaults or value != defaults[key]
        if not key.startswith("model.arch.") and value not in ({}, [])
    }


def _events(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        some = [record for kind in _EVENTS for record in run.events.get(kind, ())]
        some.sort(key=lambda record: (record.get("time") or 0, record["step"]))
        rows = [
            [f"{record['step']:,}", _when(record), escape(str(record["event"])), _about(record)]
            for record in some
        ]
        slow = run.counts.get("slow_step", 0)
        more = f"<p>{slow:,} slow steps, {run.counts.get('save', 0):,} saves.</p>"
        if len(rows) > _LISTED:
            more += f"<p>The first {_LISTED} of {len(rows):,} events; train.jsonl has all.</p>"
        name = f"{_key(runs, run)}{escape(run.name)}"
        table = _table(["step", "time (UTC)", "event", ""], rows[:_LISTED], text=4)
        parts.append(
            f"<details{' open' if len(runs) == 1 else ''}><summary>{name}</summary>{more}{table}</details>"
        )
    return _section("Events", "".join(parts))


def _when(record: dict[str, Any]) -> str:
    time = record.get("time")
    if not isinstance(time, (int, float)):
        return ""
    return datetime.datetime.fromtimestamp(time, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def _about(record: dict[str, Any]) -> str:
    fields = {key: value for key, value in record.items() if key not in ("event", "step", "time")}
    return escape(", ".join(f"{key}: {_short(value)}" for key, value in fields.items()))


def _environment(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        env = run.environment
        packages = env.get("packages") if isinstance(env.get("packages"), dict) else {}
        versions = ", ".join(f"{name} {version}" for name, version in (packages or {}).items() if version)
        gpus = ", ".join(map(str, env.get("gpus") or ())) or "none"
        name = _key(runs, run) + escape(run.name)
        rows.append(
            [
                name,
                escape(str(env.get("system", ""))),
                escape(gpus),
                escape(str(env.get("python", ""))),
                escape(versions),
            ]
        )
    return _section("Machine", _table(["run", "system", "GPUs", "Python", "packages"], rows, text=5))
