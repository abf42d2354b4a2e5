"""A GPU whose memory is really full: one sentence with the allocator's numbers and the planner's estimates."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import sys, torch, zoo
from zoo.launch.launcher import launch
from zoo.errors import UserError
torch.cuda.set_per_process_memory_fraction(0.004)
overrides = ["size=tiny", "nproc=1", "train.steps=3", "packing.budget=65536", "data.lookahead=8", "train.eval_rows=2",
             "engine.doctor=false", "log.tensorboard=false", "log.predictions=0", "export=false", "run.dir=" + sys.argv[1]]
try:
    launch(zoo.load_recipe("qwen3_vl_sft", overrides=overrides), in_process=True)  # this process has less, a child would not
except UserError as error:
    print(error)
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU's allocator can be given less")
def test_one_sentence_and_no_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")], capture_output=True, text=True, timeout=300, check=True
    )
    said = done.stdout.splitlines()[-1]
    assert said.startswith("the GPU's memory is full (") and "more were asked for, it has " in said, done
    assert "a rank was estimated to need " in said and "packing.budget=32768 would make it " in said, said
    assert not list((tmp_path / "run" / "checkpoints").glob("iter_*"))
