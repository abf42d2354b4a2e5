"""A model is built once for all that is planned of it, and anew for whatever changes its parameters."""

from typing import Any

import pytest

import zoo
from zoo.config.validate import validate
from zoo.parallel.megatron.core_import import import_core
from zoo.planner.parameters import ParameterStatistics

PLANNED = {
    "parallel.tp": 2, "engine.recompute": "full", "engine.precision": "bf16", "train.exp_avg_dtype": "fp8",
    "train.optimizer_offload_fraction": 0.5, "train.global_batch": 64, "packing.budget": 512, "run.dir": "elsewhere",
}  # fmt: skip
COUNTED = {
    "lora.rank": 4, "model.freeze": ["vision"], "train.mtp_loss": 0.0, "train.loss": "reward", "train.optimizer": "muon",
}  # fmt: skip


def test_what_decides_a_models_parameters_is_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    import_core()
    from zoo.planner import parameter_statistics as module

    built: list[Any] = []
    build = module.build.build_model
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module.build, "build_model", lambda *given: built.append(given) or build(*given))
    recipe = zoo.load_recipe("qwen35_vl_sft", overrides=["size=tiny", "hardware=cpu", "train.optimizer=adamw"])

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
    whole = statistics({"lora.rank": 4, "lora.whole_parts": ["merger"]})
    merger = sum(weights.count for weights in whole.weights if weights.part == "merger" and weights.trained)
    assert merger > 0 and whole.trained == others["lora.rank"].trained + merger


def test_the_first_weights_of_a_part_are_in_memory_where_they_are_the_reference() -> None:
    """In the place of the part's weights alone; gradients and moments are those of any part that is trained."""
    import_core()
    from zoo.planner.activations import typical_row
    from zoo.planner.memory import memory
    from zoo.planner.plan import model_of

    def planned(*keys: str) -> Any:
        recipe = validate(zoo.load_recipe("qwen3_vl_dpo_lora", ["size=4b", "hardware=1xh200", *keys]), 1)
        model = model_of(recipe)
        return model, memory(model, recipe, typical_row(recipe, model.cost), 1, fused=True)[0]

    plain, vision = (planned("train.reference=start", *more) for more in ((), ("lora.whole_parts=[vision]",)))
    base = planned("lora.whole_parts=[vision]", "train.reference=base")
    assert planned("train.reference=base")[1].weights == plain[1].weights
    count = vision[0].parameters.trained - plain[0].parameters.trained
    assert count > 4e8
    assert vision[1].weights == plain[1].weights and base[1].weights == plain[1].weights + 2 * count
    assert vision[1].grads > plain[1].grads + 2 * count - 1 and vision[1].optimizer > plain[1].optimizer
