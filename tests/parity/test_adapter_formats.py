"""Adapters in the format that vLLM loads: zoo reads them back to the bit, and peft to the same logits where transformers keeps published names."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.adapted import CASES, EXPERTS, load, with_adapters
from support.pairs import worst
from support.tiny import load_plain

from zoo.checkpoint import lora_files

SERVED = {name: replace(case, parts="language") for name, case in CASES.items()}
SERVED["qwen3 experts, gate and up alone"] = replace(SERVED["qwen3 experts"], targets=EXPERTS[:1])
SERVED["qwen3 experts, down alone"] = replace(SERVED["qwen3 experts"], targets=EXPERTS[1:])
SERVED["qwen3_vl experts, gate and up alone"] = replace(SERVED["qwen3_vl experts"], targets=EXPERTS[:1])
SERVED["qwen3_vl experts, down alone"] = replace(SERVED["qwen3_vl experts"], targets=EXPERTS[1:])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", SERVED)
def test_it_is_read_back_and_peft_loads_it(name: str, cpu_world: Any, tmp_path: Path) -> None:
    case = SERVED[name]
    folder = case.family.write(tmp_path / "hf")
    adapted = load(case, folder, cpu_world, tmp_path / "peft")
    zoo, adapters = adapted.zoo, adapted.adapters
    served = lora_files.export_adapters(
        adapters, tmp_path / "vllm", zoo.assembly, zoo.recipe, cpu_world, steps=0, adapter_format="vllm"
    )
    recipe = replace(zoo.recipe, lora=replace(zoo.recipe.lora, init=str(served)))
    _, again = with_adapters(recipe, cpu_world)
    with torch.no_grad():
        for parameter in again.named().values():
            parameter.fill_(9.0)
    lora_files.start(again, recipe)
    for key, parameter in again.named().items():
        torch.testing.assert_close(parameter, adapters.named()[key], rtol=0, atol=0)
    if any(name != published for name, published in adapters.published.items()):
        return
    wrapped = peft.PeftModel.from_pretrained(load_plain(folder), served).eval()
    plain = getattr(wrapped.base_model.model, "thinker", wrapped.base_model.model)
    with torch.no_grad():
        logits = [plain(**example.features).logits[0] for example in adapted.examples.values()]
    assert worst(logits, adapted.logits()) < 1e-4
