"""`zoo bench train`: full training steps on the same samples, packed and padded, under zoo's backends and under transformers.

Each setting runs in processes of its own, so that memory and failures are its own. Its metrics are printed and written
down as soon as they are there.
"""

from __future__ import annotations

import copy
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zoo.bench.options import Bounded
from zoo.bench.training import profile as bench_profile
from zoo.bench.training.setting import LEAST_WARM, Setting, as_dict, missing
from zoo.config.architecture import num_experts, text_config
from zoo.config.compose import load_recipe
from zoo.config.derived import data_parallel
from zoo.config.devices import gpu_count
from zoo.config.layers.keys import number
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.files import write_atomically
from zoo.launch.launcher import WorkerError, run_task
from zoo.types import JsonObject

SETTINGS = (
    "hf:4", "hf:2x2048", "padded:4", "padded:8", "padded:2x2048",
    "packed:2", "packed:4", "packed:8", "packed:16", "packed:32",
)  # fmt: skip

ROUTINGS = ("router", "even")
REQUESTED = ("samples", "passes", "warm_steps", "longest", "data", "routing")  # options that ranks are given
LOADED = ("padded:4", "row:16384")  # settings on rows that the loader brings


@dataclass(frozen=True)
class TrainBenchOptions(Bounded):
    """What is measured. Keys with a dot are the recipe's own."""

    recipe: str = "qwen35_vl_sft"
    size: str = "2b"
    settings: tuple[str, ...] = SETTINGS
    backends: tuple[str, ...] = ("torch", "te")
    data: str = ""  # a file, set or mapping, through the loader; "": samples of `zoo.bench.training.receipts`
    samples: int = number(64, 1, 10**6)  # a data-parallel rank
    passes: int = number(2, 1, 10**6)  # over the samples, timed; one more warms up
    warm_steps: int = number(LEAST_WARM, LEAST_WARM, 10**6)  # at least so many steps warm up
    longest: int = number(2048, 1, 10**8)  # most tokens of a sample
    batch: int = number(0, 0, 10**6)  # micro-batches a step, all ranks together; 0: one a data-parallel rank
    layers: int = number(0, 0, 2**10)  # of the decoder; 0: all
    routing: str = "router"  # who chooses a token's experts; "even": `zoo.bench.training.steps`
    nproc: int = number(1, 1, 4096)
    out: str = ""  # file for the results


Line = JsonObject


def run(
    options: TrainBenchOptions,
    overrides: Sequence[str] = (),
    on_line: Callable[[Line], None] = print,
    profile: bool = False,
) -> Line:
    """Measure every setting; `on_line` gets the metrics of each, and `options.out` holds all that are there.

    With `profile` each setting's last steps are run under PyTorch's profiler (`zoo.bench.training.profile`).

    Raises:
        UserError: options or overrides that make no sense.
        KeyboardInterrupt: stopped; what is there is written.
    """
    recipe = bench_recipe(options, overrides)
    if options.batch % (ranks := data_parallel(recipe, options.nproc)):
        why = f"{ranks} data-parallel ranks can't share so many micro-batches evenly"
        raise UserError(f"batch={options.batch}: {why}; give a multiple")
    if options.routing not in ROUTINGS:
        raise UserError(f"routing={options.routing}: wanted one of {', '.join(ROUTINGS)}")
    if options.routing == "even" and not num_experts(recipe.model.arch):
        raise UserError(f"routing=even: {options.recipe} size={options.size} has no experts; leave it out")
    report: Line = {
        "bench": "train", "command": shlex.join(["zoo", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "recipe": options.recipe, "size": options.size, "layers": options.layers or None, "data": options.data or None,
        "samples": options.samples, "longest": options.longest, "routing": options.routing,
        "overrides": list(overrides), "environment": None, "lines": [],
    }  # fmt: skip
    for setting in _all(options):
        line = {**as_dict(setting), **_measure(setting, recipe, options, profile)}
        report["environment"] = line.pop("environment", None) or report["environment"]
        report["lines"].append(line)
        on_line(line)
        if options.out:
            write_atomically(Path(options.out), json.dumps(report, indent=2) + "\n")
    return report


def _all(options: TrainBenchOptions) -> list[Setting]:
    """All settings to measure, in order; those of zoo once for each backend."""
    results = []
    for text in LOADED if options.data and options.settings == SETTINGS else options.settings:
        setting = Setting.parse(text)
        if (why := _misfit(setting, options)) is not None:
            raise UserError(f"settings={text}{why}")
        if setting.way != "hf":
            results += [replace(setting, backend=backend, ranks=options.nproc) for backend in options.backends]
        elif options.nproc == 1:
            results.append(setting)
    return results


def _misfit(setting: Setting, options: TrainBenchOptions) -> str | None:
    """Why a setting can't be measured with the other options, as the end of a sentence."""
    if options.data:
        if setting.way in ("packed", "hf"):
            loader = f"data={options.data} come from the loader; take row:TOKENS or padded:N"
            return f" takes ready samples, and {loader}"
        return None
    if setting.number > options.samples and setting.way != "row":
        return f": a micro-batch of it takes more than samples={options.samples}"
    tokens = setting.number if setting.way == "row" else setting.width
    if tokens is not None and tokens < options.longest:
        return f": a sample may have longest={options.longest} tokens"
    if setting.way == "hf" and options.batch:
        return ": a step of transformers takes one micro-batch; leave out batch="
    if setting.way == "hf" and options.routing != "router":
        return f": routing={options.routing} is of zoo's settings; leave one of the two out"
    return None


def bench_recipe(options: TrainBenchOptions, overrides: Sequence[str]) -> Recipe:
    """The recipe that all settings share."""
    bench_keys = [
        f"size={options.size}", "model.init=random", "parallel.plan=[]", "train.lr=1e-5", "train.min_lr=0",
        "train.warmup_steps=0", "train.weight_decay=0.01", "train.clip_grad=1.0", "train.eval_rows=0",
        "train.mtp_loss=0",  # transformers trains no multi-token prediction
        "log.tensorboard=false", "log.straggler_steps=0", "export=false",
    ]  # fmt: skip
    mapping = options.data.startswith("{")  # as data.train takes it
    rows = [f"data.train=[{options.data}]"] if mapping else []
    recipe = load_recipe(options.recipe, [*bench_keys, *rows, *overrides])
    if options.data and not mapping:
        recipe = replace(recipe, data=replace(recipe.data, train=[options.data]))
    if not options.layers:
        return recipe
    return recipe.replace({"model.arch": with_layers(dict(recipe.model.arch), options.layers)})


def with_layers(arch: JsonObject, layers: int) -> JsonObject:
    """The architecture with the first `layers` layers of its decoder, and what belongs to those alone."""
    arch = copy.deepcopy(arch)
    text: Any = text_config(arch)
    if layers > text["num_hidden_layers"]:
        raise UserError(f"layers={layers}: the decoder has {text['num_hidden_layers']}")
    text["num_hidden_layers"] = layers
    if text.get("layer_types"):
        text["layer_types"] = text["layer_types"][:layers]
    if text.get("mlp_only_layers"):
        text["mlp_only_layers"] = [layer for layer in text["mlp_only_layers"] if layer < layers]
    vision = arch.get("thinker_config", arch).get("vision_config") or {}
    if vision.get("deepstack_visual_indexes"):
        vision["deepstack_visual_indexes"] = vision["deepstack_visual_indexes"][:layers]
    return arch


def _measure(setting: Setting, recipe: Recipe, options: TrainBenchOptions, profile: bool) -> Line:
    """Metrics of a setting, or why there are none."""
    if reason := missing(setting.backend):
        return {"skipped": reason}
    batches = options.batch or data_parallel(recipe, setting.ranks)
    budgets = {"row": setting.number, "packed": setting.number * options.longest}
    changes = {
        "train.steps": 10**6,  # the run ends by itself
        "train.global_batch": batches * (1 if setting.packed else setting.number),
        "train.micro_batch": 1 if setting.packed else setting.number,
        "packing.mode": "thd" if setting.packed else "none",
        "packing.budget": budgets.get(setting.way, setting.width or options.longest),
        "packing.pad_to": setting.width,
        "engine.backend": "torch" if setting.way == "hf" else setting.backend,
    }
    request = {name: getattr(options, name) for name in REQUESTED}
    request |= {"setting": vars(setting), "profile": profile}
    task = f"zoo.bench.training.{'hf' if setting.way == 'hf' else 'steps'}:measure"
    try:
        with tempfile.TemporaryDirectory(prefix="zoo-bench-") as folder:  # for rows that are left out
            changes["run.dir"] = folder
            line: Line = run_task(task, recipe.replace(changes), setting.ranks, request, fresh=True)
    except WorkerError as error:
        return {"failed": f"exit code {error.code}; its last messages stand above"}
    return line


HEAD = (
    f"{'':<16}{'backend':<8}{'GPUs':>5}{'ms':>9}{'quartiles':>16}{'tokens a step':>15}{'real':>7}"
    f"{'real tokens/s':>15}{'samples/s':>11}{'MFU':>7}{'GiB':>7}{'reserved':>10}{'loss':>8}{'norm':>8}{'start s':>9}"
)


def row(line: Line) -> str:
    """A line of the table."""
    start = f"{line['name']:<16}{line['backend']:<8}{line['ranks']:>5}"
    for word in ("skipped", "failed"):
        if word in line:
            return f"{start}  {word}: {line[word]}"
    if line.get("oom"):
        return f"{start}  out of memory"
    low, high = line["ms_quartiles"]
    spread = f"{low:.1f} - {high:.1f}"
    mfu = "-" if line["mfu"] is None else f"{line['mfu']:.1%}"
    peak, reserved = ("-" if x is None else f"{x:.1f}" for x in (line["peak_gib"], line["reserved_gib"]))
    text = (
        f"{start}{line['ms']:>9.1f}{spread:>16}{line['tokens_per_step']:>15,}{line['real_share']:>7.0%}"
        f"{line['real_tokens_per_s']:>15,.0f}{line['samples_per_s']:>11.2f}{mfu:>7}{peak:>7}{reserved:>10}"
        f"{line['loss']:>8.3f}{line['grad_norm']:>8.2f}{line['startup_s']:>9.1f}"
    )
    if "data_wait" in line:
        text += f"  waits {line['data_wait']:.1%}, at worst {line['data_wait_max']:.0%} of a step"
    return text + (f"\n{bench_profile.table(line['profile'])}" if "profile" in line else "")


def where(report: Line) -> str:
    """The recipe, GPUs, versions and date of a result, in a line."""
    environment = report["environment"] or {}
    packages = {name: version for name, version in environment.get("packages", {}).items() if version}
    names = ("torch", "transformers", "megatron-core", "transformer-engine", "triton")
    shown = ", ".join(f"{name} {packages[name]}" for name in names if name in packages)
    gpus = environment.get("gpus") or ["no GPU"]
    accelerators = gpu_count() or 1
    return f"{report['recipe']} size={report['size']}, {accelerators} x {gpus[0]}, {shown}, {report['date']}"
