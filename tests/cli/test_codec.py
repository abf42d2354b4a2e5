"""The example of a codec: it keeps what it has made, and a model is trained on its codes and speaks in them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import python

EXAMPLE = Path(__file__).parents[2] / "examples" / "say_digits.py"
ROUND_TRIP = """
import json, runpy, sys
import numpy as np, soundfile
example = runpy.run_path(sys.argv[1])
row = json.loads(open("runs/say_digits/heldout.jsonl").readline())
sound, rate = soundfile.read("runs/say_digits/" + row["speech"], dtype="float32")
codes = example["encode"](sound, rate)
assert len(example["decode"](codes)) == len(sound), "as long as it was"
again = example["encode"](example["decode"](codes), rate)
print(json.dumps([codes.tolist(), again.tolist()]))
"""


@pytest.mark.slow
def test_a_model_is_trained_on_codes_of_sounds_and_speaks_in_them(tmp_path: Path) -> None:
    made = python(EXAMPLE, cwd=tmp_path)
    assert "128 rows in runs/say_digits/heldout.jsonl" in made.stdout, made.stdout + made.stderr
    codes, again = (torch.tensor(x) for x in json.loads(run("-c", ROUND_TRIP, EXAMPLE, cwd=tmp_path)))
    assert codes.shape[1] == 4 and codes.min() >= 0 and codes.max() < 32
    assert (codes[:, 0] == again[:, 0]).float().mean() > 0.5, "by chance 1 of 32"
    common = ("data.outside_root=true", f"data.codec={EXAMPLE}:encode", "hardware=cpu")
    rows = ("data.train=runs/say_digits/train.jsonl", "data.eval=none", "train.steps=2")
    run("-m", "zoo", "train", "recipe=demo", "train.speech_loss=1", *rows, *common, "run.dir=runs/voice", cwd=tmp_path)
    heldout = tmp_path / "runs" / "say_digits" / "heldout.jsonl"
    spoken = ("out=runs/model", "answers=rows", "audio=false", "talker_max_new_tokens=8", "max_rows=3")
    run("-m", "zoo", "speak", "runs/voice", heldout, *spoken, cwd=tmp_path)
    (tmp_path / "runs" / "model" / "speech").mkdir(exist_ok=True)
    np.save(tmp_path / "runs" / "model" / "speech" / "0.npy", codes.numpy())
    heard = run(EXAMPLE, "runs/model", cwd=tmp_path)
    assert "of 128 rows were said to their end" in heard
    assert (tmp_path / "runs" / "model" / "speech" / "0.wav").is_file()


def run(*arguments: str | Path, cwd: Path) -> str:
    done = python(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
