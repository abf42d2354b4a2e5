"""The doctor: its references against loops, the result of a check, kernels that are refused, and the verb."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.cli.runs import doctor as verb
from zoo.doctor import expert_checks, inputs, machine, references
from zoo.doctor.measure import Check, Trial, run_check
from zoo.errors import UserError
from zoo.nn.backend import TEBackend, TorchBackend, core_attention
from zoo.nn.decoder.attention import gated_delta_net, self_attention
from zoo.packing import PackedLayout


def test_the_delta_rule_token_by_token() -> None:
    torch.manual_seed(0)
    lengths, width = (70, 1, 9), 6
    layout = PackedLayout.from_lengths(lengths, align=4)
    total = layout.total
    q, k = (torch.randn(total, 2, width, dtype=torch.float64) for _ in range(2))
    v = torch.randn(total, 4, 5, dtype=torch.float64)
    decay, beta = -torch.rand(total, 4, dtype=torch.float64), torch.rand(total, 4, dtype=torch.float64)
    wanted = torch.zeros(total, 4, 5, dtype=torch.float64)
    for start, stop in inputs.spans(layout):
        state = torch.zeros(4, width, 5, dtype=torch.float64)
        for t in range(start, stop):
            norms = ((x[t].square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (k, q))
            key, query = ((x[t] / norm).repeat_interleave(2, 0) for x, norm in zip((k, q), norms, strict=True))
            state = state * decay[t].exp()[:, None, None]
            correction = beta[t][:, None] * (v[t] - torch.einsum("gkv,gk->gv", state, key))
            state = state + torch.einsum("gk,gv->gkv", key, correction)
            wanted[t] = torch.einsum("gkv,gk->gv", state, query) / width**0.5
    found = references.delta_rule(q, k, v, decay, beta, inputs.spans(layout))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_ragged_rows_fit_and_have_padding_between() -> None:
    for budget, align in ((4096, 16), (100_000, 16), (512, 24), (20, 16)):
        layout = inputs.ragged(budget, align)
        assert layout.total <= max(min(budget, inputs.MOST_TOKENS), layout.padded_lengths[0])
        assert layout.lengths != layout.padded_lengths
    assert sum(expert_checks._uneven(7, 100)) == 100 and 0 in expert_checks._uneven(7, 100)


def test_an_error_and_a_result_that_is_not_finite_are_reported() -> None:
    x = torch.ones(3)

    def result(kernel: Any) -> Any:
        return run_check(Check("norm", "k", "3", "fp32", 1e-3, "fix", lambda: Trial(kernel, lambda x: x, {"x": x})))

    def refuse(x: Tensor) -> Tensor:
        raise RuntimeError("no kernel image")

    assert result(lambda x: x * 1.0).right
    assert result(refuse).problem == "RuntimeError: no kernel image"
    undefined = result(lambda x: x * torch.tensor([1.0, 1.0, float("nan")]))
    assert not undefined.right and undefined.as_dict()["errors"]["out"] is None


VERSIONS = [
    ("3.3.1", 9, False),
    ("3.4.0", 9, True),
    ("3.7.0", 9, True),
    ("3.7.1", 9, False),
    ("3.6.0", 8, False),
    ("3.6.0", 10, False),
]


@pytest.mark.parametrize(("triton", "capability", "wrong"), VERSIONS)
def test_the_miscompiled_delta_rule_is_refused(
    triton: str, capability: int, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated_delta_net, "installed_version", lambda name: triton)
    monkeypatch.setattr(gated_delta_net, "has_fla", lambda x: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    gated_delta_net.fla_fault.cache_clear()
    x = torch.zeros(1)
    try:
        if wrong:
            with pytest.raises(UserError, match=r"pip install 'triton>=3.7.1', or set engine.delta_rule=torch"):
                gated_delta_net.delta_rule_kernel(x)
        else:
            assert gated_delta_net.delta_rule_kernel(x) == "fla"
        assert gated_delta_net.delta_rule_kernel(x, "torch") == "torch"
        with torch.no_grad():
            assert gated_delta_net.delta_rule_kernel(x) == "fla", "the forward pass is right"
    finally:
        gated_delta_net.fla_fault.cache_clear()


def test_te_is_not_given_heads_it_gets_wrong() -> None:
    class Named(TEBackend):
        def core_attention(self) -> type:
            return str

    own = self_attention.VarlenCoreAttention
    for width, window, wanted in ((256, None, own), (128, None, str), (128, (9, 0), own)):
        config: Any = SimpleNamespace(kv_channels=width, window_size=window)
        assert core_attention(config, Named()) is wanted and core_attention(config, TorchBackend()) is own


def test_pytorch_s_message_stands_for_a_cudnn_it_was_not_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Transformer Engine built for another cuDNN brings one: PyTorch raises where it is asked for the version."""
    said = "cuDNN version incompatibility: compiled against 9.19, found 9.14"

    def version() -> int:
        raise RuntimeError(f"{said}. PyTorch comes with its own.")

    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    assert machine._cudnn() == said


def test_the_verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert verb.run(["recipe=llava_sft", "size=tiny", "hardware=cpu", "kernels=norm,loss", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [kernel["kernel"] for kernel in found["kernels"]] == ["norm", "loss"]
    with pytest.raises(UserError, match="nearest: attention"):
        verb.run(["recipe=llava_sft", "kernels=atention"])
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda x, *rest: x)
    assert verb.run(["recipe=llava_sft", "size=tiny", "hardware=cpu", "kernels=norm"]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out and "fix: engine.precision=fp32" in out
