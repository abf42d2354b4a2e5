"""`zoo bench train`: samples, settings and metrics, and a run of it on the CPU."""

import json
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zoo.bench.training import train as bench_train
from zoo.bench.training.profile import Event, kind, report
from zoo.bench.training.receipts import receipts, with_pixels
from zoo.bench.training.setting import Setting, Timed, metrics, peak_flops, train_flops
from zoo.bench.training.steps import BenchRun, LoadedRun, kernels, route_evenly
from zoo.checkpoint.saver import Saver
from zoo.cli.main import main
from zoo.config.compose import load_recipe
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.logging.startup_time import Startup
from zoo.model import build
from zoo.nn.decoder.experts.router import Router
from zoo.nn.flops import model_cost
from zoo.parallel.signals import Interrupts


def recipe(size: str) -> Recipe:
    return load_recipe("qwen35_vl_sft", [f"size={size}", "hardware=cpu", "model.init=random"])


def test_samples_are_of_the_stated_sizes_and_always_the_same() -> None:
    config = build.assemble(recipe("2b")).config
    samples = receipts(config, 200)
    images = [int((s.input_ids == config.root.image_token_id).sum()) for s in samples]
    texts = [s.length - image - 10 for s, image in zip(samples, images, strict=True)]
    assert 400 <= min(images) < 500 and 1300 < max(images) <= 1440
    assert 100 <= min(texts) < 120 and 580 < max(texts) <= 600 and max(s.length for s in samples) <= 2048
    for sample, image in zip(samples, images, strict=True):
        assert int(sample.media["image_grid_thw"].prod()) == 4 * image
        assert int((sample.labels != -100).sum()) == sample.length - image
    torch.testing.assert_close(receipts(config, 3)[2].input_ids, samples[2].input_ids, rtol=0, atol=0)
    pixels = with_pixels(samples[1], config).media["pixel_values"]
    assert pixels.shape == (4 * images[1], 1536)
    again = with_pixels(receipts(config, 2)[1], config).media["pixel_values"]
    torch.testing.assert_close(again, pixels, rtol=0, atol=0)
    # The published script has the generator of seed 1234, in the order height, width, text, tokens.
    sample = samples[0]
    generator = torch.Generator().manual_seed(1234)
    bounds = ((20, 41), (20, 37), (100, 601))
    height, width, text = (int(torch.randint(*ends, (1,), generator=generator)) for ends in bounds)
    assert sample.media["image_grid_thw"].tolist() == [[1, 2 * height, 2 * width]]
    assert sample.length == 8 + 2 + height * width + text


def test_settings_are_read_and_named_as_typed() -> None:
    assert all(Setting.parse(text).name == text for text in bench_train.SETTINGS)
    assert Setting.parse("padded:2x2048") == Setting("padded", 2, 2048)
    for text in ("packed", "packed:0", "packed:2x64", "flat:2", "hf:"):
        with pytest.raises(UserError, match=f"settings: '{text}' is none; wanted packed:N"):
            Setting.parse(text)


def test_rows_filled_by_the_packer_leave_out_the_end_of_the_stream() -> None:
    samples = receipts(build.assemble(recipe("2b")).config, 100)
    bins = Setting.parse("row:16384").bins(samples, 1, [s.length for s in samples])
    fills = [sum(samples[i].length for i in rows) for rows in bins]
    assert len(bins) >= 5 and max(fills) <= 16384 and min(fills) > 0.9 * max(fills)
    assert [len(rows) for rows in Setting.parse("packed:32").bins(samples, 1, [])] == [32, 32, 32]


def test_figures_by_hand() -> None:
    """Two steps of other sizes that take as long a token: rates are those of all samples, MFU of all GPUs."""
    steps = [
        Timed(100.0, 2, 1000, 1250, {"decoder": 9.895e12, "vision": 0.0}),
        Timed(200.0, 4, 2000, 2500, {"decoder": 9.895e12, "vision": 9.895e12}),
    ]
    found = metrics(Setting("packed", 2, ranks=2), steps, "NVIDIA H200")
    assert found["ms"] == 150.0 and found["real_tokens_per_s"] == 10000 and found["samples_per_s"] == 20
    assert found["real_share"] == 0.8 and found["tokens_per_step"] == 1875
    # 19.79 and 9.895 TFLOP in 0.3 s on two GPUs of 989.5 TFLOP/s each.
    assert found["mfu_parts"] == pytest.approx({"decoder": 1 / 30, "vision": 1 / 60}, abs=1e-4)
    assert found["mfu"] == 0.05
    assert metrics(Setting("packed", 2), steps, "")["mfu"] is None


PEAKS = {  # TFLOP/s
    "NVIDIA H100 80GB HBM3": 989.5, "NVIDIA H200": 989.5, "NVIDIA GH200 480GB": 989.5, "NVIDIA H100 PCIe": 756, "NVIDIA L4": 121,
    "NVIDIA GeForce RTX 4090": 165.2, "NVIDIA A100-SXM4-40GB": 312,
}  # fmt: skip


def test_peaks_are_found_by_the_names_of_gpus() -> None:
    assert {name: peak_flops(name) for name in PEAKS} == {name: 1e12 * peak for name, peak in PEAKS.items()}
    assert peak_flops("NVIDIA RTX A1000 Laptop GPU") is None


def test_flops_are_three_times_those_of_the_parts() -> None:
    config = build.assemble(recipe("2b")).config
    cost, (sample,) = model_cost(config), receipts(config, 1)
    rows = [int(sample.media["image_grid_thw"].prod())]
    parts = cost.parts([sample.length], sample.num_labels, {"vision": rows})
    both = train_flops(cost, [sample.length] * 2, 2 * sample.num_labels, {"vision": 2 * rows})
    assert both == pytest.approx({name: 6 * flops for name, flops in parts.items()})


def test_fewer_layers_take_what_belongs_to_them_along() -> None:
    arch = dict(load_recipe("qwen3_vl_moe_sft", ["size=30b-a3b"]).model.arch)
    cut = bench_train.with_layers(arch, 2)
    assert cut["text_config"]["num_hidden_layers"] == 2 and arch["text_config"]["num_hidden_layers"] == 48
    assert cut["vision_config"]["deepstack_visual_indexes"] == [8, 16]
    kinds = bench_train.with_layers(dict(recipe("2b").model.arch), 5)["text_config"]["layer_types"]
    assert len(kinds) == 5 and kinds[3] == "full_attention"
    with pytest.raises(UserError, match="layers=49: the decoder has 48"):
        bench_train.with_layers(arch, 49)


def test_the_library_of_the_delta_rule_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fla", "fla.ops.gated_delta_rule", "flash_qla"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert kernels([]) == {"core_attention": None, "delta_rule": None}
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(__version__="0.6.0"))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", SimpleNamespace())
    assert kernels([])["delta_rule"] == "flash-linear-attention 0.6.0"
    monkeypatch.setitem(sys.modules, "flash_qla", SimpleNamespace(__version__="0.1.3"))
    assert kernels([])["delta_rule"] == "FlashQLA 0.1.3", "which takes the other's norms"


def test_kinds_of_kernels() -> None:
    names = {
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>": "attention backward",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<256, cutlass::bfloat16_t>>": "attention forward",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": "attention backward",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": "delta rule",
        "tilelang_prepare_h_kernel_kernel": "delta rule",
        "nvjet_tst_192x192_64x3_2x1_v_bz_coopB_TNT": "matrix products",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>": "optimizer",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": "communication",
        "Memcpy HtoD (Pinned -> Device)": "copies and casts",
        "triton_red_fused__fused_rms_norm_add_0": "norm",
        "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor>": "elementwise and sums",
    }
    assert {name: kind(name) for name in names} == names


def test_idle_time_is_what_no_kernel_covers() -> None:
    events = [Event("gemm", 0, 3000, 3000), Event("nccl", 2000, 4000, 2000), Event("gemm", 6000, 8000, 2000)]
    found = report(events, steps=2)
    assert (found["span_ms"], found["busy_ms"], found["idle_ms"]) == (4.0, 3.0, 1.0)
    assert found["kinds"] == {"matrix products": 2.5, "communication": 1.0}
    assert found["top"][0] == {"name": "gemm", "kind": "matrix products", "ms": 2.5, "calls": 1.0}
    assert found["gaps"] == [{"after": "nccl", "before": "gemm", "ms": 1.0}]


SMALL = ["size=tiny", "longest=128", "samples=4", "passes=1", "backends=torch"]


@pytest.mark.slow
def test_the_same_samples_packed_padded_and_under_transformers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    settings = ["packed:2", "padded:2x128", "hf:2"]
    options = [*SMALL, f"settings={','.join(settings)}", f"out={out}", "--profile"]
    assert main(["bench", "train", *options]) == 0
    shown = capfd.readouterr().out
    saved = json.loads(out.read_text())
    packed, padded, plain = saved["lines"]
    assert [line["name"] for line in saved["lines"]] == settings
    assert all(name in shown for name in settings) and "matrix products" in shown
    assert saved["environment"]["packages"]["torch"] and saved["size"] == "tiny"
    # One gradient step after the other: packed and padded train alike.
    assert packed["losses"] == pytest.approx(padded["losses"], abs=2e-4)
    assert packed["grad_norm"] == pytest.approx(padded["grad_norm"], rel=1e-3)
    assert packed["parameters"] == plain["parameters"], "the same model, without multi-token prediction"
    assert packed["real_tokens_per_step"] == padded["real_tokens_per_step"] == plain["real_tokens_per_step"]
    assert packed["tflop_per_step"] == plain["tflop_per_step"]
    assert packed["real_share"] == 1.0 and padded["tokens_per_step"] == 256
    assert packed["profile"]["kinds"]["matrix products"] > 0 and packed["startup"]["weights"] >= 0
    assert all(line["ms"] > 0 and len(line["losses"]) == 12 for line in saved["lines"])


def test_a_router_is_trained_before_steps_are_timed() -> None:
    options = bench_train.TrainBenchOptions(
        recipe="qwen3_vl_moe_sft", size="tiny-moe", longest=64, samples=4, passes=1, settings=("packed:2",),
        backends=("torch",), warm_steps=7,
    )  # fmt: skip
    (line,) = bench_train.run(options, ["hardware=cpu", "engine.threads=1", "train.lr=0.01"])["lines"]
    balance = line["moe_load_balancing_loss"]
    assert line["warm_steps"] == 8, "whole passes of two steps"
    assert len(balance) == len(line["losses"]) == 16 and balance[0] != balance[-1] >= 0.9


RUNS = [("qwen3_vl_sft", ""), ("qwen3_vl_lora", ""), ("qwen3_vl_sft", "digits:train")]


@pytest.mark.parametrize(("name", "data"), RUNS)
def test_a_run_of_the_bench_is_a_run(
    name: str, data: str, cpu_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: its own samples, and rows through the loader, whose wait and FLOPs of two kinds of media are shown."""
    options = bench_train.TrainBenchOptions(recipe=name, size="tiny", longest=64, samples=2, passes=1, data=data)
    recipe = bench_train.bench_recipe(options, ["hardware=cpu", "engine.threads=1", "data.workers=0"])
    row = {"packing.mode": "thd", "packing.budget": 256, "train.global_batch": 1, "run.dir": str(tmp_path)}
    request = {"samples": 2, "passes": 1, "warm_steps": 4, "longest": 64, "routing": "router", "profile": False}
    request |= {"setting": vars(Setting("row", 128)), "data": data}
    monkeypatch.setattr(Saver, "prepare", lambda *_: pytest.fail("takes memory for saves"))
    kind = LoadedRun if data else BenchRun
    with closing(kind(recipe.replace(row), cpu_world, Interrupts(), Startup("imports"), request)) as run:
        line = run.measure()
    assert line["steps"] == 8 and line["loss"] > 0 and ("data_wait" in line) == bool(data)
    assert not list(tmp_path.rglob("*.safetensors")), "of 30 billion random weights they would take a minute"
    assert set(line["tflop_per_step"]) == {"decoder", "head", "vision"} and line["real_tokens_per_s"] > 0


def test_experts_are_drawn_evenly() -> None:
    chunk, gates = torch.nn.Module(), torch.randn(8, 16, requires_grad=True)
    for number in (1, 2):
        router = Router.__new__(Router)
        torch.nn.Module.__init__(router)
        router.layer_number, router.gating = number, lambda hidden: hidden @ gates
        chunk.register_module(str(number), router)
    route_evenly([chunk], rank=0)
    first, second = chunk.children()
    hidden = torch.ones(4096, 8)  # all alike, so a router would send them all to the same experts
    drawn = first.gating(hidden)
    chosen = drawn.topk(4).indices
    assert chosen.flatten().bincount(minlength=16).float().std() < 0.1 * 1024
    torch.testing.assert_close(first.gating(hidden), drawn, rtol=0, atol=0)
    assert not torch.equal(second.gating(hidden), drawn)
    (drawn * 2).sum().backward()
    torch.testing.assert_close(gates.grad, torch.full((8, 16), 2 * 4096.0), rtol=0, atol=0)


@pytest.mark.slow
def test_a_setting_that_fails_is_told_and_the_next_one_runs(capfd: pytest.CaptureFixture[str]) -> None:
    options = bench_train.TrainBenchOptions(
        size="tiny", longest=64, samples=2, passes=1, settings=("packed:1",), backends=("te", "torch")
    )
    lines: list[dict] = []
    bench_train.run(options, ["engine.recompute=full"], lines.append)
    assert lines[0]["skipped"] == "Transformer Engine is not installed" and lines[1]["ms"] > 0
    assert "skipped: Transformer Engine" in bench_train.row(lines[0])


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["settings=packed:128"], "settings=packed:128: a micro-batch of it takes more than samples=64"),
        (["settings=row:1024"], "settings=row:1024: a sample may have longest=2048 tokens"),
        (["setings=hf:4"], "setings: no such key; nearest: settings"),
        (["nproc=2", "batch=3"], "batch=3: 2 data-parallel ranks can't share so many micro-batches evenly"),
        (["settings=hf:4", "batch=8"], "settings=hf:4: a step of transformers takes one micro-batch"),
        (["routing=even"], "routing=even: qwen35_vl_sft size=2b has no experts"),
        (["routing=odd"], "routing=odd: wanted one of router, even"),
        (["recipe=qwen3_vl_moe_sft", "size=tiny-moe", "settings=hf:2", "routing=even"], "settings=hf:2: routing=even is of zoo's"),
        (["passes=0"], "passes=0: wanted a whole number from 1 to 1,000,000"),
        (["recipe=llava_sft", "size=tiny", "settings=packed:2", "longest=12"], "give longest="),
        (["data=digits:train", "settings=packed:2"], "settings=packed:2 takes ready samples, and data=digits:train come from"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(given: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", "train", *given])
    shown = capfd.readouterr()
    assert words in shown.err + shown.out and (code == 2 or "failed" in shown.out)
