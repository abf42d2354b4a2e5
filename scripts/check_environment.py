"""Makes an environment and uses zoo in it: python scripts/check_environment.py [lowest|newest|vllm]

    lowest   the lower bounds of pyproject.toml
    newest   the newest versions that its ranges allow
    vllm     the newest next to vLLM, in one environment

Without a name, the one whose turn it is (scripts/run_tests.py says what the turn follows from). The check: `pip check`, `zoo list`, a tiny
training with its export, and the export as transformers loads it. Where vLLM is installed, it resolves the export's model too.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = {"lowest": ("dev", "lowest"), "newest": ("dev", "newest"), "vllm": ("dev,vllm", "newest")}
SHOWN = [
    "torch",
    "torchvision",
    "transformers",
    "huggingface-hub",
    "megatron-core",
    "triton",
    "numpy",
    "vllm",
    "flashinfer-python",
]
TRAINING = ["recipe=qwen3_vl_sft", "size=tiny", "hardware=cpu", "nproc=1", "train.steps=2", "data.eval=none"]
INSIDE = "--inside"  # run by the environment that is checked


def whose_turn(number: int) -> str:
    return list(ENVIRONMENTS)[number % len(ENVIRONMENTS)]


def check_inside() -> None:
    """Use zoo in the environment that runs this; SystemExit where something fails."""
    for name in SHOWN:
        try:
            print(f"{name}=={version(name)}")
        except PackageNotFoundError:
            print(f"{name} is not installed")
    zoo = str(Path(sys.executable).with_name("zoo"))
    subprocess.run([sys.executable, "-m", "pip", "check"], check=True)
    subprocess.run([zoo, "list"], check=True, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([zoo, "train", *TRAINING, f"run.dir={folder}/run"], check=True, cwd=folder)
        export = f"{folder}/run/export"
        load_with_transformers(export)
        if find_spec("vllm"):
            subprocess.run([sys.executable, __file__, "--vllm", export], check=True, cwd=folder)


def load_with_transformers(export: str) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    AutoProcessor.from_pretrained(export)
    model, report = AutoModelForImageTextToText.from_pretrained(export, output_loading_info=True)
    wrong = {key: names for key, names in report.items() if names}
    if wrong:
        sys.exit(f"transformers loads the export with {wrong}")
    print(f"transformers loads {type(model).__name__}")


def resolve_with_vllm(export: str) -> None:
    """vLLM's own reading of the export's config, and its class of that model: as far as it goes without a GPU."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=export, dtype="float32", max_model_len=2048).create_model_config()
    print(f"vLLM resolves {config.architectures}, of modality {'several' if config.is_multimodal_model else 'text'}")


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--vllm"]:
        resolve_with_vllm(arguments[1])
        return 0
    if arguments == [INSIDE]:
        check_inside()
        return 0
    if not arguments:
        sys.path.insert(0, str(ROOT / "scripts"))
        import os

        from run_tests import run_number

        number, reason = run_number(os.environ)
        arguments = [whose_turn(number)]
        print(f"The environment {arguments[0]}: its turn follows from {reason}.")
    if len(arguments) != 1 or arguments[0] not in ENVIRONMENTS:
        print(f"{' '.join(arguments)}: wanted one of {', '.join(ENVIRONMENTS)}", file=sys.stderr)
        return 2
    (name,) = arguments
    start = time.time()
    venv = f".venv-{name}"
    made = subprocess.run(["sh", "scripts/setup_env.sh", venv, *ENVIRONMENTS[name]], cwd=ROOT).returncode
    code = made or subprocess.run([f"{venv}/bin/python", __file__, INSIDE], cwd=ROOT).returncode
    print(f"The environment {name} {'fails' if code else 'works'}: {time.time() - start:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
