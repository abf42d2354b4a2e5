"""A server's process: started on a free port, waited for, and gone on every path; and the command that vLLM is started with."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import tiny
from support.tiny_qwen3 import write_tiny_qwen3
from support.tiny_qwen3_vl import write_tiny_qwen3_vl

from zoo.config.compose import load_recipe
from zoo.config.entries import MediaLimits, PixelLimits
from zoo.errors import UserError
from zoo.tools.serving.client import is_ready
from zoo.tools.serving.folder import ServedFolder, vllm_command
from zoo.tools.serving.server import started

# Answers everything from 0.3 s after its start on; notes its process id and that of a child which hears no SIGTERM.
SERVER = """
import http.server, os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
open(sys.argv[2], "w").write(f"{os.getpid()} {child.pid}")
time.sleep(0.3)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
print("it runs", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
FAILS = """
import sys
print("(EngineCore pid=7) ERROR 11-29 08:00:00 [core.py:12] ValueError: heads of 7 are not known")
for number in range(30):
    print("line", number)
sys.exit(3)
"""


def script(text: str, *arguments: str) -> Callable[[int], list[str]]:
    return lambda port: [sys.executable, "-c", text, str(port), *arguments]


def gone(pids: Path, seconds: float = 30) -> bool:
    """Whether the processes of a file end."""
    left = [int(pid) for pid in pids.read_text().split()]
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        left = [
            pid
            for pid in left
            if Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()
        ]
        time.sleep(0.1)
    return not left


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_it_is_gone_behind_the_block_with_all_its_processes(error: type[BaseException] | None, tmp_path: Path) -> None:
    pids, log = tmp_path / "pids", tmp_path / "server.log"
    try:
        with started(script(SERVER, str(pids)), is_ready, seconds=60, log=log, quiet=True) as url:
            assert is_ready(url) and url.startswith("http://127.0.0.1:")
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt) as caught:
        assert type(caught) is error
    assert gone(pids, 1) and log.read_text().startswith("it runs\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_process_that_started_it(number: signal.Signals, tmp_path: Path) -> None:
    pids, program = tmp_path / "pids", tmp_path / "asks.py"
    program.write_text(
        "import sys, time\nfrom zoo.tools.serving.client import is_ready\nfrom zoo.tools.serving.server import started\n"
        f"command = lambda port: [sys.executable, '-c', {SERVER!r}, str(port), {str(pids)!r}]\n"
        "with started(command, is_ready, seconds=60, log=None, quiet=True):\n    print('up', flush=True)\n    time.sleep(600)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(number)
    process.wait(30)
    process.stdout.close()
    assert gone(pids)


def test_an_early_end_is_told_with_what_the_log_says(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with (
        pytest.raises(UserError, match="with exit code 3, before it answered") as caught,
        started(script(FAILS), is_ready, seconds=60, log=log, quiet=True),
    ):
        pytest.fail("it never runs")
    lines = str(caught.value).splitlines()
    assert lines[1] == "  ValueError: heads of 7 are not known" and lines[-2:] == ["  line 29", f"its log: {log}"]
    assert log.read_text().endswith("line 29\n")


def test_one_that_never_answers_is_stopped_in_time(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with (
        pytest.raises(UserError, match=r"does not answer after \d s; give it longer with server_seconds="),
        started(script(SERVER, str(pids)), lambda url: False, seconds=1.5, log=tmp_path / "log", quiet=True),
    ):
        pytest.fail("it never answers")
    assert gone(pids, 1)


def test_one_that_ends_at_work_is_told(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with (
        pytest.raises(UserError, match="no answer; the server has ended:\n  it runs"),
        started(script(SERVER, str(pids)), is_ready, seconds=60, log=tmp_path / "log", quiet=True),
    ):
        os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)
        raise UserError("no answer")
    assert gone(pids)


def test_adapters_are_served_beside_their_base(tmp_path: Path) -> None:
    base, adapter = write_tiny_qwen3(tmp_path / "base"), tmp_path / "run" / "export"
    adapter.mkdir(parents=True)
    config = {"base_model_name_or_path": str(base), "r": 12, "rank_pattern": {"layers.0": 20}}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    folder = ServedFolder.from_path(str(tmp_path / "run"))
    assert (folder.weights, folder.adapter, folder.dtype) == (str(base), adapter, "float32")
    command = vllm_command("vllm", folder, 8001, 100, {}, ["--enforce-eager"])
    assert command[:3] == ["vllm", "serve", str(base)] and command[-1] == "--enforce-eager"
    text = " ".join(command)
    assert f"--enable-lora --max-lora-rank 32 --lora-modules served={adapter}" in text and "--dtype float32" in text
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"r": 1000}))
    with pytest.raises(UserError, match="adapters of rank 1000, and vLLM takes 512 at most"):
        vllm_command("vllm", folder, 8001, 100, {}, [])


@pytest.mark.parametrize(
    ("write", "stacks", "passes"),
    [
        (write_tiny_qwen3, ["gate_up_proj", "down_proj"], False),
        (write_tiny_qwen3_vl, ["gate_up_proj", "down_proj"], True),
        (write_tiny_qwen3_vl, ["down_proj"], False),
        (write_tiny_qwen3, [], True),
    ],
)
def test_experts_in_a_format_that_vllm_does_not_take(
    write: Callable[..., Path], stacks: list[str], passes: bool, tmp_path: Path
) -> None:
    base, adapter = write(tmp_path / "base", moe=True), tmp_path / "adapter"
    adapter.mkdir()
    names = [f"model.layers.{layer}.mlp.experts.{stack}" for layer in range(2) for stack in stacks]
    names.append("model.layers.0.mlp.shared_experts.up_proj.weight")
    config = {"base_model_name_or_path": str(base), "r": 8, "target_parameters": names}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    folder = ServedFolder.from_path(str(adapter))
    if passes:
        assert "--enable-lora" in vllm_command("vllm", folder, 8001, 100, {}, [])
        return
    with pytest.raises(
        UserError, match=r"these experts in another format; write it: zoo convert RUN OUT adapter_format=vllm"
    ):
        vllm_command("vllm", folder, 8001, 100, {}, [])


def test_the_context_holds_the_rows_and_is_no_longer_than_the_model_takes(tmp_path: Path) -> None:
    folder = write_tiny_qwen3(tmp_path, max_position_embeddings=9000)

    def length(longest: int) -> str:
        command = vllm_command("vllm", ServedFolder.from_path(str(folder)), 8001, longest, {}, [])
        assert command[command.index("--served-model-name") + 1] == "served"
        return command[command.index("--max-model-len") + 1]

    assert [length(longest) for longest in (100, 8500, 20000)] == ["8192", "8501", "9000"]


def test_what_no_file_says_of_videos_stands_in_the_command(tmp_path: Path) -> None:
    processor, other = (
        tiny.processor(name, load_recipe(f"{name}_sft", ["size=tiny"]).model.arch)
        for name in ("qwen3_omni", "qwen3_vl")
    )
    size = dict(processor.hf.video_processor.size)
    limits = MediaLimits(1.5, 16, PixelLimits(video_most=4096))
    assert processor.options_of_servers(MediaLimits(2.0, 16)) == {"videos_kwargs": {"fps": 2.0, "size": size}}
    options = processor.options_of_servers(limits)
    assert options == {"videos_kwargs": {"fps": 1.5, "size": size | {"longest_edge": 4096}}}
    assert other.options_of_servers(limits) == {}
    folder = ServedFolder.from_path(str(write_tiny_qwen3(tmp_path)))
    command = vllm_command("vllm", folder, 8001, 100, options, ["--seed", "1"])
    assert json.loads(command[command.index("--mm-processor-kwargs") + 1]) == options and command[-1] == "1"
    assert "--mm-processor-kwargs" not in vllm_command("vllm", folder, 8001, 100, {}, [])
