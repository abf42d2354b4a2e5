"""AdamW on the host by the compiled function: PyTorch's operations are the reference."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zoo.nn.adamw import cpu, state
from zoo.nn.adamw.state import Moment, Part
from zoo.optim import host_update
from zoo.parallel.megatron import cpu_host

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FORMS = [
    (torch.float32, torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.uint8, torch.uint8),
    (torch.bfloat16, torch.bfloat16, torch.float32, torch.uint8),
    (torch.float32, torch.bfloat16, torch.uint8, torch.bfloat16),
]


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    assert cpu.fallback_reason() is None, cpu.fallback_reason()
    yield
    cpu._loaded.cache_clear()


def example(numel: int, weight: torch.dtype, grad: torch.dtype, *moments: torch.dtype) -> Part:
    generator = torch.Generator().manual_seed(numel)
    values, remainder = torch.randn(numel, generator=generator), None
    if weight == torch.bfloat16:
        values, remainder = state.split(values)
    slope = torch.randn(numel, generator=generator) * torch.logspace(-6, 0, numel)
    slope[::7] = 0.0
    device = torch.device("cpu")
    held = [Moment.zeros(numel, dtype, signed, device) for dtype, signed in zip(moments, (True, False), strict=True)]
    return Part(values, remainder, slope.to(grad), *held, seed=2**32 - 50)  # the seed's sum with the index overflows


def master(part: Part) -> torch.Tensor:
    return part.weight if part.remainder is None else state.join(part.weight, part.remainder)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("numel", [1, 127, 128, 1000, 4096])
def test_it_is_the_update_of_pytorch(form: tuple[torch.dtype, ...], numel: int) -> None:
    found, wanted = example(numel, *form), example(numel, *form)
    for step in range(1, 6):
        clip = 0.5 if step % 2 else 1.0
        cpu.update(found, step=step, clip=clip, **OPTIONS)
        state.update(wanted, step=step, clip=clip, **OPTIONS)
        torch.testing.assert_close(master(found), master(wanted), rtol=3e-6, atol=1e-7)
        for one, other in ((found.exp_avg, wanted.exp_avg), (found.exp_avg_sq, wanted.exp_avg_sq)):
            if one.values.dtype == torch.float32:
                torch.testing.assert_close(one.values, other.values, rtol=1e-5, atol=1e-12)
                continue
            apart = (one.values.view(torch.int16) if one.values.dtype == torch.bfloat16 else one.values).int()
            apart -= (other.values.view(torch.int16) if one.values.dtype == torch.bfloat16 else other.values).int()
            assert int(apart.abs().max()) <= 1 and float((apart != 0).float().mean()) <= 2e-3 + 1 / numel
        wanted = Part(**{**vars(wanted)})
        for name in ("weight", "remainder"):  # so that differences do not add up
            if getattr(found, name) is not None:
                getattr(wanted, name).copy_(getattr(found, name))
        for name in state.MOMENTS:
            getattr(wanted, name).values.copy_(getattr(found, name).values)
            if getattr(wanted, name).exponents is not None:
                getattr(wanted, name).exponents.copy_(getattr(found, name).exponents)


def test_pieces_have_the_bits_of_the_whole() -> None:
    form = (torch.bfloat16, torch.bfloat16, torch.uint8, torch.uint8)
    whole, cut = example(1000, *form), example(1000, *form)
    for step in (1, 2):
        cpu.update(whole, step=step, **OPTIONS)
        for piece in host_update.pieces(cut, 256):
            cpu.update(piece, step=step, **OPTIONS)
    torch.testing.assert_close(master(whole), master(cut), rtol=0, atol=0)
    torch.testing.assert_close(whole.exp_avg.values, cut.exp_avg.values, rtol=0, atol=0)
    torch.testing.assert_close(whole.exp_avg_sq.exponents, cut.exp_avg_sq.exponents, rtol=0, atol=0)


def test_chunks_of_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside a GPU, by way of its buffers."""
    monkeypatch.setattr(host_update, "CHUNK", 512)
    monkeypatch.setattr(host_update, "COMPILED_PIECE", 128)
    form = (torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16)
    whole, cut = example(3000, *form), example(3000, *form)
    with cpu_host.redirected():
        work = host_update.HostUpdate(threads=3)
        work._how = host_update._compiled()
        for step in (1, 2):
            options = {"step": step, "clip": 0.3, **OPTIONS}
            cpu.update(whole, **options)
            work.start([(cut, options)])
            work.finish()
    torch.testing.assert_close(master(whole), master(cut), rtol=0, atol=0)
    torch.testing.assert_close(whole.exp_avg.values, cut.exp_avg.values, rtol=0, atol=0)


def test_without_a_compiler_pytorch_does_it(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    cpu._loaded.cache_clear()
    monkeypatch.setattr(cpu.shutil, "which", lambda name: None)
    assert "no C compiler" in (cpu.fallback_reason() or "")
    assert host_update._compiled()[0] is state.update
    assert "install a C compiler" in capfd.readouterr().err
    found, wanted = (example(300, *FORMS[1]) for _ in range(2))
    cpu.update(found, step=1, **OPTIONS)
    state.update(wanted, step=1, clip=1.0, **OPTIONS)
    torch.testing.assert_close(master(found), master(wanted), rtol=0, atol=0)


def test_a_compiler_that_fails_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    broken = tmp_path / "broken.c"
    monkeypatch.setattr(cpu, "SOURCE", broken)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for source, said in (
        ("int zoo_adamw(\n", "could not compile broken.c"),
        ("int zoo_adamw(void) { return 0; }\n", "differs from PyTorch's operations"),
    ):
        broken.write_text(source)
        cpu._loaded.cache_clear()
        assert said in (cpu.fallback_reason() or "")
