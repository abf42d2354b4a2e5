"""`zoo report`: one self-contained HTML page about one run, or several compared."""

from __future__ import annotations

import base64
import datetime
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from markupsafe import Markup

from zoo.errors import UserError
from zoo.files import write_atomically
from zoo.logging.progress_line import clock
from zoo.logging.result import Model, run_of
from zoo.pages import render
from zoo.tools.runs.charts import COLOURS, Line, chart, lines_of, number
from zoo.tools.runs.history import Run, differences, read_run
from zoo.types import JsonObject

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
_OTHER_TITLES = {"mtp_loss": "Loss of multi-token prediction", "moe_load_balancing_loss": "Load balancing loss"}
_NOT_DRAWN = {"loss", "real_tokens", "labels", "data_ms", *_STEP_CHARTS}
_EVENTS = ("start", "resume", "end", "skip", "new_level", "changed", "damaged_checkpoint", "damaged_file", "export")


def report(runs: Model | Sequence[Model], out: str | Path | None = None) -> Path:
    """Write a page about runs, finished or not, and return its path.

    Args:
        runs: run folders, or what names them: a `TrainResult`, a recipe, or a recipe's name or file; up to 8.
        out: the file; default: report.html in the first run's folder.

    Raises:
        UserError: a folder holds no run, or there are too many.
    """
    folders = [run_of(run) for run in (runs if isinstance(runs, list | tuple) else [runs])]
    if not 1 <= len(folders) <= MOST_RUNS:
        raise UserError(f"zoo report takes 1 to {MOST_RUNS} run folders, not {len(folders)}")
    read = [read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    path = Path(out) if out is not None else read[0].folder / "report.html"
    if path.suffix not in (".html", ".htm"):
        raise UserError(f"out={path}: wanted the name of an HTML file, such as out=report.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(read))
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
    others = dict.fromkeys(name for run in runs for name in run.metrics if name not in _NOT_DRAWN)
    further = {name: (_OTHER_TITLES.get(name, name), "") for name in others}
    sections = [
        ("", _overview(runs)),
        ("Loss and scores", _grid([_losses(runs), *_scores(runs)])),
        ("Predictions on held-out rows", _predictions(runs)),
        ("Training steps", _grid(_step_charts(runs, _STEP_CHARTS, zero=True))),
        ("Further metrics", _grid(_step_charts(runs, further))),
        ("Data", _data(runs)),
        _recipe(runs),
        ("Events", _events(runs)),
        ("Machine", _environment(runs)),
    ]
    shown = [(heading, body) for heading, body in sections if body]
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return render("zoo.tools.runs", "page.html.jinja", title=title, now=now, sections=shown)


def _grid(charts: Sequence[Markup]) -> Markup:
    return Markup('<div class="charts">{}</div>').format(Markup().join(charts)) if any(charts) else Markup()


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1) -> Markup:
    """A table whose first `text` columns are set flush left."""
    return render("zoo.tools.runs", "table.html.jinja", head=head, rows=rows, text=text)


def _overview(runs: Sequence[Run]) -> Markup:
    rows: dict[str, Callable[[Run], str]] = {
        "state": lambda run: run.status.state + (f": {run.status.why}" if run.status.why else ""),
        "recipe": lambda run: " ".join(str(run.recipe.get(key) or "") for key in ("recipe", "size")),
        "steps": lambda run: f"{run.status.step:,} of {run.status.total_steps or '?'}",
        "loss of the last step": lambda run: _shown(run.status.loss, ".4f"),
        "mean loss of the last steps": lambda run: (
            "" if run.status.mean_loss is None else f"{run.status.mean_loss:.4f} ({run.status.mean_loss_steps} steps)"
        ),
        "held-out loss": lambda run: _shown((run.status.eval or {}).get("loss"), ".4f"),
        "exact match": lambda run: _shown((run.status.eval or {}).get("exact_match"), ".1%"),
        "best exact match": _best,
        "real tokens/s": lambda run: _shown(_middle(run, "tokens_per_second"), ",.0f"),
        "waiting for data": lambda run: _shown(_middle(run, "data_wait"), ".1%"),
        "time": lambda run: "" if run.seconds is None else clock(run.seconds),
        "starts": lambda run: str(run.status.starts),
        "steps not applied": lambda run: str(run.status.skipped_steps),
        "rows left out": lambda run: f"{sum(run.status.bad_rows.values()):,}",
    }
    head = ["", *(_labelled(runs, run) for run in runs)]
    return _table(head, [[name, *map(cell, runs)] for name, cell in rows.items()], text=len(head))


def _labelled(runs: Sequence[Run], run: Run) -> str:
    """The run's name; among several, behind its colour."""
    if len(runs) == 1:
        return run.name
    colour = COLOURS[list(runs).index(run)]
    return Markup('<i class="key" style="background:{}"></i>{}').format(colour, run.name)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _middle(run: Run, metric: str) -> float | None:
    """The median over all steps but the first, which compiles kernels and fills caches."""
    values = run.metrics[metric].values if metric in run.metrics else ()
    return statistics.median(values[1:] if len(values) > 1 else values) if len(values) else None


def _best(run: Run) -> str:
    scored = [record for record in run.evaluations if isinstance(record.get("exact_match"), (int, float))]
    if not scored:
        return ""
    best = max(scored, key=lambda record: record["exact_match"])
    return f"{best['exact_match']:.1%} at step {best['step']:,}"


def _losses(runs: Sequence[Run]) -> Markup:
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
    points = []
    for record in run.evaluations:
        value: object = record
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, (int, float)):
            points.append((float(record["step"]), float(value)))
    return points


def _scores(runs: Sequence[Run]) -> list[Markup]:
    """Exact match of all rows by run, and of each kind of row."""
    kinds = sorted({kind for run in runs for record in run.evaluations for kind in record.get("by_kind") or {}})
    if len(runs) == 1:
        lines = [Line("all", _points(runs[0], "exact_match"), "#1d2433", dots=True)]
        for kind, colour in zip(kinds, COLOURS, strict=False):
            lines.append(Line(kind, _points(runs[0], "by_kind", kind, "exact_match"), colour, dots=True))
        return [chart("Exact match on held-out rows", lines, share=True)]
    charts = []
    for kind in (None, *kinds):
        keys = ("exact_match",) if kind is None else ("by_kind", kind, "exact_match")
        lines = [Line(run.name, _points(run, *keys), COLOURS[i], dots=True) for i, run in enumerate(runs)]
        charts.append(chart(f"Exact match, {kind or 'all held-out rows'}", lines, share=True))
    return charts


def _step_charts(runs: Sequence[Run], charts: dict[str, tuple[str, str]], zero: bool = False) -> list[Markup]:
    drawn = []
    for metric, (title, unit) in charts.items():
        lines: list[Line] = []
        for run, colour in zip(runs, COLOURS, strict=False):
            if metric in run.metrics:
                lines += lines_of(run.name, run.metrics[metric], colour, smooth=metric != "lr")
        drawn.append(chart(title, lines, unit=unit, zero=zero))
    return drawn


def _predictions(runs: Sequence[Run]) -> Markup:
    """The picture of the last predictions, as the run drew it."""
    parts = []
    for run in runs:
        plot = run.folder / "plots" / "predictions.png"
        if plot.is_file():
            if len(runs) > 1:
                parts.append(Markup("<h3>{}</h3>").format(_labelled(runs, run)))
            data = base64.b64encode(plot.read_bytes()).decode("ascii")
            parts.append(Markup('<img alt="predictions of {}" src="data:image/png;base64,{}">').format(run.name, data))
    return Markup().join(parts)


def _data(runs: Sequence[Run]) -> Markup:
    """The entries of each mixture, the held-out rows by kind, and the rows that were left out."""
    rows = []
    for run in runs:
        last = run.evaluations[-1] if run.evaluations else {}
        kinds = ", ".join(f"{scores.get('rows')} {kind}" for kind, scores in (last.get("by_kind") or {}).items())
        left_out = ", ".join(f"{count:,} {cause}" for cause, count in run.status.bad_rows.items()) or "none"
        tokens, labels = (
            sum(run.metrics[name].values if name in run.metrics else ()) for name in ("real_tokens", "labels")
        )
        trained = ", ".join(map(_plain, _listed(run.recipe.get("data.train"))))
        evaluated = ", ".join(map(_plain, _listed(last.get("data")))) + (f": {kinds}" if kinds else "")
        share = f"{labels / tokens:.1%}" if tokens else ""
        rows.append([_labelled(runs, run), trained, evaluated, number(tokens), share, left_out])
    head = ["run", "trains on", "evaluates on", "real tokens", "tokens with loss", "rows left out"]
    return _table(head, rows, text=3)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _recipe(runs: Sequence[Run]) -> tuple[str, Markup]:
    """A heading, and the keys in which runs differ; of a single run, those that its user and recipe set."""
    if len(runs) > 1:
        keys = differences(runs)
        if not keys:
            return "Recipes", Markup("<p>The recipes are the same.</p>")
        head = ["key", *(_labelled(runs, run) for run in runs)]
        rows = [[key, *map(_short, values)] for key, values in keys.items()]
        return "Recipes: the keys that differ", _table(head, rows, text=len(head))
    rows = [[key, _short(value)] for key, value in _set_keys(runs[0]).items()]
    body = _table(["key", "value"], rows, text=2) if rows else Markup()
    return "Recipe: what differs from the defaults", body


def _short(value: object) -> str:
    text = _plain(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _set_keys(run: Run) -> JsonObject:
    from zoo.config.layers.keys import keys
    from zoo.config.schema import Recipe

    defaults = {entry.key: entry.default for entry in keys(Recipe).values()}
    return {
        key: value
        for key, value in run.recipe.items()
        if key not in defaults or value != defaults[key]
        if not key.startswith("model.arch.") and value not in ({}, [])
    }


def _events(runs: Sequence[Run]) -> Markup:
    parts = []
    for run in runs:
        events = [record for kind in _EVENTS for record in run.events.get(kind, ())]
        events.sort(key=lambda record: (record.get("time") or 0, record["step"]))
        rows = []
        for record in events:
            time = record.get("time")
            when = "" if time is None else f"{datetime.datetime.fromtimestamp(time, datetime.UTC):%Y-%m-%d %H:%M:%S}"
            fields = {key: value for key, value in record.items() if key not in ("event", "step", "time")}
            about = ", ".join(f"{key}: {_short(value)}" for key, value in fields.items())
            rows.append([f"{record['step']:,}", when, str(record["event"]), about])
        counts = Markup(f"<p>{run.counts.get('slow_step', 0):,} slow steps, {run.counts.get('save', 0):,} saves.</p>")
        if len(rows) > _LISTED:
            counts += Markup(f"<p>The first {_LISTED} of {len(rows):,} events; train.jsonl has all.</p>")
        table = _table(["step", "time (UTC)", "event", ""], rows[:_LISTED], text=4)
        opened = Markup(" open") if len(runs) == 1 else ""
        details = Markup("<details{}><summary>{}</summary>{}{}</details>")
        parts.append(details.format(opened, _labelled(runs, run), counts, table))
    return Markup().join(parts)


def _environment(runs: Sequence[Run]) -> Markup:
    rows = []
    for run in runs:
        env = run.environment
        packages = env.get("packages") if isinstance(env.get("packages"), dict) else {}
        versions = ", ".join(f"{name} {version}" for name, version in (packages or {}).items() if version)
        gpus = ", ".join(map(str, _listed(env.get("gpus")))) or "none"
        rows.append([_labelled(runs, run), str(env.get("system", "")), gpus, str(env.get("python", "")), versions])
    return _table(["run", "system", "GPUs", "Python", "packages"], rows, text=5)
