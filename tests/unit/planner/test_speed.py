"""What the planner ranks layouts by, against runs in benchmarks/results: tokens a second, and one layout over another."""

import json
from pathlib import Path
from typing import Any

import pytest

import zoo
from zoo.bench.training.receipts import receipts
from zoo.bench.training.train import TrainBenchOptions, bench_recipe
from zoo.config.derived import data_parallel
from zoo.config.validate import validate
from zoo.planner.activations import Row
from zoo.planner.plan import model_of
from zoo.planner.speed import Speed
from zoo.registry import get_family

pytestmark = pytest.mark.slow

RESULTS = Path(zoo.__file__).parents[1] / "benchmarks/results"


def tokens_per_second(result: dict[str, Any]) -> tuple[float, float]:
    """Estimated and measured, of the first setting of a result."""
    line = next(line for line in result["lines"] if line["way"] == "row" and line["backend"] == "torch")
    keys = [text for text in result["overrides"] if text.startswith(("parallel.", "engine.recompute="))]
    recipe = bench_recipe(
        TrainBenchOptions(recipe=result["recipe"], size=result["size"], layers=result["layers"]), keys
    )
    given = [word for word in result["command"].split() if word.startswith("batch=")]
    batch = int(given[0].removeprefix("batch=")) if given else data_parallel(recipe, line["ranks"])
    changes = {"engine.precision": "bf16", "packing.budget": line["number"], "train.global_batch": batch}
    recipe = validate(recipe.replace({**changes, "machine.gpus": line["ranks"], "machine.gpu": "h200"}), line["ranks"])
    config = get_family(recipe.model.family).load("config").from_arch(dict(recipe.model.arch))
    tokens, some = line["real_tokens_per_step"] / batch, []
    for sample in receipts(config, result["samples"], result["longest"]):
        if sum(one.length for one in some) + sample.length <= tokens:
            some.append(sample)
    labels = sum(sample.num_labels for sample in some)
    patches = tuple(float(grid.prod()) for sample in some for grid in sample.media["image_grid_thw"])
    row = Row(tuple(sample.length for sample in some), labels, {"vision": patches})
    seconds = Speed(model_of(recipe), row).seconds(recipe, line["ranks"])
    return row.total / seconds, line["real_tokens_per_s"]


@pytest.mark.parametrize(
    "name",
    [
        *("h200-row-1gpu", "h200-row-2gpus", "h200-row-4gpus", "h200-row-cp2", "h200-row-tp2cp2"),
        *("h200-30b-ep4-ahead", "h200-30b-24-layers-ep2", "h200-lora-30b-a3b-quack"),
        *("h200-lora-30b-ep2-4gpus", "h200-lora-30b-ep4-beside", "h200-lora-30b-ep1"),
    ],
)
def test_tokens_a_second(name: str) -> None:
    """Routers with random weights chose the experts of runs with such, so their times include waits for the rank with most rows."""
    estimated, measured = tokens_per_second(json.loads((RESULTS / f"{name}.json").read_text()))
    assert estimated == pytest.approx(measured, rel=0.1)


def test_experts_shared_out_over_experts_on_every_rank() -> None:
    """The test holds the ratio alone, as these runs multiplied with PyTorch's kernels."""
    (estimated, measured), (of_whole, measured_whole) = (
        tokens_per_second(json.loads((RESULTS / f"{name}.json").read_text()))
        for name in ("h200-moe-ep2", "h200-moe-ep1")
    )
    assert estimated / of_whole == pytest.approx(measured / measured_whole, rel=0.05)
