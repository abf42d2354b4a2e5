"""A model is built once for all that is planned of it, and anew for whatever changes its parameters."""

from typing import Any

import pytest

import zoo
from zoo.engine.megatron.core_import import import_core
from zoo.planner.parameters import ParameterStatistics

PLANNED = {
    "parallel.tp": 2,
    "engine.recompute": "full",
    "engine.precision": "bf16",
    "train.exp_avg_dtype": "fp8",
    "train.optimizer_offload_fraction": 0.5,
    "train.global_batch": 64,
    "packing.budget": 512,
    "run.dir": "elsewhere",
}
COUNTED = {
    "lora.rank": 4,
    "model.freeze": ["vision"],
    "train.mtp_loss": 0.0,
    "train.loss": "reward",
    "train.optimizer": "muon",
}


def test_what_decides_a_models_parameters_is_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    import_core()
    from zoo.engine.planning import parameter_statistics as module

    built: list[Any] = []
    build = module.build.build_model
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module.build, "build_model", lambda *given: built.append(given) or build(*given))
    recipe = zoo.load_recipe(
        "qwen35_vl_sft", overrides=["size=tiny", "hardware=cpu", "train.optimizer=adamw"]
    )

    def statistics(changes: dict[str, Any]) -> ParameterStatistics:
        return module.parameter_statistics(recipe.replace(changes))

    first = statistics({})
    assert [statistics({key: value}) for key, value in PLANNED.items()] == [first] * len(PLANNED)
    assert statistics(PLANNED) == first and len(built) == 1
    monkeypatch.setattr(module, "_known", {})
    assert statistics(PLANNED) == first, "none of these changes a parameter"
    others = {key: statistics({key: value}) for key, value in COUNTED.items()}
    assert [key for key, found in others.items() if found == first] == []
    assert len(built) == 2 + len(COUNTED)
