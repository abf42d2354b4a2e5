"""vLLM's own loader puts adapters of a run into its layers: what it adds to a weight is what merging adds, in every expert too.

ZOO_VLLM names the program of vLLM's environment; else it is this one's, if it is there. It runs on a CPU, where dense adapters
answer, too.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import Zoo, write_rows

pytestmark = pytest.mark.slow(minutes=15)
SCRIPT = Path(__file__).parents[1] / "support" / "vllm_adapters.py"
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
MODELS = {
    "qwen3_vl": ("qwen3_vl_lora", "tiny", []),
    "qwen3_vl experts": ("qwen3_vl_moe_lora", "tiny-moe", EXPERTS),
    "qwen35_vl experts": ("qwen35_vl_moe_lora", "tiny-moe", EXPERTS),
    "qwen3 experts": ("qwen3_moe_lora", "tiny-moe", EXPERTS),
    "qwen3 experts, down alone": ("qwen3_moe_lora", "tiny-moe", EXPERTS[1:]),
}
IDS = [5, 9, 20, 31, 44, 12, 7, 3]


def python_with_vllm() -> str:
    if given := os.environ.get("ZOO_VLLM"):
        return str(Path(given).with_name("python"))
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    pytest.skip("no vLLM here: ZOO_VLLM=/path/to/venv/bin/vllm names its program")


@pytest.mark.parametrize("name", MODELS)
def test_vllm_adds_what_merging_adds(name: str, zoo: Zoo, tmp_path: Path) -> None:
    python = python_with_vllm()
    recipe, size, experts = MODELS[name]
    run = tmp_path / "run"
    rows = [{"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "red"}]}] * 4
    done = zoo(
        "train", f"recipe={recipe}", f"size={size}", "model.init=random", "nproc=1", f"run.dir={run}", "train.steps=6", "train.warmup_steps=0",
        f"data.train={write_rows(tmp_path / 'rows.jsonl', rows)}", "train.global_batch=2", "packing.budget=128", "engine.precision=fp32",
        "train.lr=3e-2", "lora.rank=4", "lora.alpha=6", "lora.dropout=0", f"lora.targets={json.dumps(['all-linear', *experts])}",
    )  # fmt: skip
    assert done.code == 0, done
    served, merged = tmp_path / "served", tmp_path / "merged"
    assert zoo("convert", str(run), str(served), "adapter_format=vllm").code == 0
    assert zoo("convert", str(run), str(merged)).code == 0
    command = [python, str(SCRIPT), str(run / "base"), str(merged), str(served)]
    dense = not experts
    if dense:  # there are no kernels for adapters of experts on a CPU
        command.append(",".join(map(str, IDS)))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.strip().splitlines()[-1])
    language = {key: value for key, value in found["weights"].items() if "visual" not in key}
    assert {key for key, (difference, _) in language.items() if difference > 1e-5} == set()
    changed = {key.rpartition(".")[2] for key, (_, change) in language.items() if change > 1e-3}
    assert {"qkv_proj", "o_proj"} <= changed and ({"w13", "w2"} <= changed or experts != EXPERTS)
    if dense:
        base, adapter, whole = (found["logprobs"][key] for key in ("base", "adapter", "merged"))
        assert max(abs(a - b) for a, b in zip(adapter, base, strict=True)) > 0.1
        assert adapter == pytest.approx(whole, abs=1e-4)
