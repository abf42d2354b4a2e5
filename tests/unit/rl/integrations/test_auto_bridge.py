"""The façade of AutoBridge: weights in and out of an engine are those of the folder."""

from pathlib import Path

import pytest
import torch
from support.matrix import MODELS
from support.weights import tensors

from zoo.errors import UserError
from zoo.rl.integrations.auto_bridge import AutoBridge


def test_weights_in_and_out(tmp_path: Path) -> None:
    first, second = (MODELS["dense"].write(tmp_path / name) for name in ("first", "second"))
    wanted = {name: tensor + 1 for name, tensor in tensors(second).items()}
    from safetensors.torch import save_file

    (file,) = second.glob("*.safetensors")
    save_file(wanted, file, metadata={"format": "pt"})
    overrides = ["engine.precision=fp32", "engine.threads=1", "packing.budget=4096"]
    bridge = AutoBridge.from_hf_pretrained(first, overrides=overrides, trust_remote_code=True)
    with bridge.open() as engine:
        bridge.load_hf_weights([engine], second)
        found = dict(bridge.export_hf_weights([engine], cpu=True, conversion_tasks=bridge.get_conversion_tasks(engine)))
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=0)
        bridge.load_hf_weights(engine)
        one = next(iter(bridge.export_hf_weights(engine)))
        torch.testing.assert_close(one.weight, tensors(first)[one.param_name], rtol=0, atol=0)
        with pytest.raises(UserError, match="no adapters"):
            bridge.export_adapter_weights(engine)
