"""A plan with the kernels of a GPU, against the peaks that benchmarks measured on one: benchmarks/results holds them."""

import json
from pathlib import Path
from typing import Any

import pytest

import zoo
from zoo.bench.training.receipts import receipts
from zoo.bench.training.train import TrainBenchOptions, bench_recipe
from zoo.config.validate import validate
from zoo.planner.activations import Row
from zoo.planner.memory import memory
from zoo.planner.plan import model_of
from zoo.registry import get_family

RESULTS = [
    json.loads(path.read_text()) for path in (Path(zoo.__file__).parents[1] / "benchmarks/results").glob("*.json")
]
PACKED = [
    pytest.param(result, line, id=f"{result['date'][:10]} {result['recipe']} {line['name']} {line['backend']}")
    for result in RESULTS
    for line in result["lines"]
    if line.get("way") == "packed" and line.get("ranks") == 1 and line.get("peak_gib") and not result["layers"]
]


@pytest.mark.parametrize(("result", "line"), PACKED)
def test_peak_of_a_step(result: dict[str, Any], line: dict[str, Any]) -> None:
    bench = TrainBenchOptions(recipe=result["recipe"], size=result["size"])
    recipe = bench_recipe(bench, result["overrides"])
    # What CUDA graphs keep activations in counts as reserved, not as in use.
    graphs = recipe.engine.cuda_graphs is True
    changes = {"engine.precision": "bf16", "packing.budget": line["number"] * result["longest"]}
    changes["engine.cuda_graphs"] = graphs  # elsewhere they are a choice of the planner's
    recipe = validate(recipe.replace({**changes, "train.global_batch": 1, "train.steps": 1}), 1, on_this_machine=False)
    config = get_family(recipe.model.family).load("config").from_arch(dict(recipe.model.arch))
    samples, number, model = (receipts(config, result["samples"], result["longest"]), line["number"], model_of(recipe))
    # Bytes: earlier runs held whole fp32 copies of bf16 weights.
    copies = 2.0 * model.parameters.trained if result["date"] < "2026-11-24" else 0.0
    planned = []
    for first in range(0, len(samples), number):
        some = samples[first : first + number]
        labels = sum(int((sample.labels != -100).sum()) for sample in some)
        patches = [float(grid.prod()) for sample in some for grid in sample.media["image_grid_thw"]]
        row = Row(tuple(sample.length for sample in some), labels, {"vision": tuple(patches)})
        planned.append((memory(model, recipe, row, 1, fused=True)[0].total + copies) / 2**30)
    assert max(planned) == pytest.approx(line["reserved_gib" if graphs else "peak_gib"], rel=0.05)
