"""`zoo verify served=vllm` with a real vLLM: ZOO_VLLM names its program, or it is on PATH; without one, skipped."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import zoo
from zoo.cli.main import main

PROGRAM = os.environ.get("ZOO_VLLM") or shutil.which("vllm")
pytestmark = [
    pytest.mark.slow(minutes=15),
    pytest.mark.skipif(PROGRAM is None, reason="no vLLM: ZOO_VLLM=/path/to/venv/bin/vllm names its program"),
]


@pytest.mark.parametrize("recipe", ["qwen3_vl_sft", "qwen3_vl_lora"])
def test_a_run_is_served_as_it_was_trained(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    run, keys = (
        tmp_path / "run",
        ["size=tiny", "train.steps=3", "train.lr=1e-2", "train.global_batch=4", "hardware=cpu", "nproc=1"],
    )
    assert main(["train", f"recipe={recipe}", *keys, f"run.dir={run}", "data.eval=none", "log.tensorboard=false"]) == 0
    pixels = np.random.default_rng(0).integers(0, 255, (3, 64, 96, 3), dtype=np.uint8)
    images = [Image.fromarray(array) for array in pixels]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    tool = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}

    def turns(*contents: str) -> list[dict[str, object]]:
        roles = ["user", "assistant"] * 2
        return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]

    rows = [
        {
            "messages": [
                {"role": "system", "content": "Be short."},
                *turns("One?", "1", "Two?", "<think>\nhm\n</think>\n\n2"),
            ]
        },
        {"messages": turns("<image>What?", "This."), "images": images[:1]},
        {"messages": turns("<image> or <image>?", "One.", "Or <image>?", "No."), "images": images},
        {
            "messages": [
                *turns("1+2?"),
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "3"},
                {"role": "assistant", "content": "3."},
            ],
            "tools": [{"type": "function", "function": tool}],
        },
        {"text": "A plain text."},
    ]
    log = tmp_path / "server.log"
    arguments = ["--enforce-eager", "--max-model-len", "2048"]
    options = {"served": PROGRAM, "server_args": arguments, "server_log": log, "in_process": True}
    result = zoo.verify_served(run, rows=rows, **options)
    assert result.equal and len(result.rows_with("differences")) == len(rows) and result.largest_difference < 1e-4
    assert log.stat().st_size
