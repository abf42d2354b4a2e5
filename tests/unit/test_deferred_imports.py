"""megatron-core is imported without flashinfer, which lies beside vLLM and SGLang, works or does not, and is imported when it is called."""

import os
import subprocess
import sys
from pathlib import Path


def run(code: str, folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_megatron_core_is_imported_beside_a_flashinfer_that_fails(tmp_path: Path) -> None:
    """As next to vLLM, with packages of CUDA's Python that don't fit one another."""
    (tmp_path / "flashinfer.py").write_text("raise AttributeError(\"no attribute 'cudaLibrary_t'\")\n")
    code = (
        "import sys, zoo\n"
        "from megatron.core.inference.quantization import utils, mxfp8_tensor\n"
        "import megatron.core.inference.sampling\n"
        "print('flashinfer' in sys.modules)\n"
        "try: utils.flashinfer_mm_mxfp8(1)\n"
        "except AttributeError as error: print(error)\n"
    )
    assert run(code, tmp_path).splitlines() == ["False", "no attribute 'cudaLibrary_t'"]


def test_flashinfer_is_imported_when_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("def mm_mxfp8(x):\n    return x + 1\n")
    (tmp_path / "flashinfer" / "rope.py").write_text("turns = 3\n")
    code = (
        "import sys, zoo\n"
        "from megatron.core.inference.quantization import utils\n"
        "print('flashinfer' in sys.modules, utils.HAVE_FLASHINFER, utils.flashinfer_mm_mxfp8(1))\n"
        "import flashinfer.rope\n"
        "print(flashinfer.rope.turns)\n"
    )
    assert run(code, tmp_path).splitlines() == ["False True 2", "3"]
