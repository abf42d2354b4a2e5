"""Media of rows are decoded by workers with limits, whatever reads the rows: no tool decodes in a process of its own."""

import ast
import inspect
import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from PIL import Image, ImageFile
from support.tiny_omni import PROCESSOR_ARCH

import zoo
from zoo.cli.main import main
from zoo.config.locate import look
from zoo.config.schema import DataConfig
from zoo.data.errors import RowError
from zoo.data.loading.row_encoder import RowEncoder
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.decoding_workers import DecodingWorkers, decoder_for
from zoo.data.processors.processor import Processor
from zoo.data.sources.references import Access
from zoo.data.sources.rows import make_row
from zoo.generation.prompts import Prompt, make_prompt
from zoo.models.qwen3_omni.processor import build_processor
from zoo.tools.hf_score import hf_logprobs

REPO = Path(__file__).parents[3]
# Calls that decode a file, or open it for that, by the names that they are imported under.
DECODERS = {
    "PIL.Image.open", "PIL.ImageFile.Parser", "av.open", "soundfile.SoundFile", "soundfile.read", "soundfile.blocks", "soundfile.info", "wave.open",
    "matplotlib.image.imread", "matplotlib.pyplot.imread",
}  # fmt: skip
LIBRARIES = {
    "torchaudio", "torchcodec", "decord", "cv2", "imageio", "librosa", "pydub", "audioread", "skimage", "qwen_vl_utils", "qwen_omni_utils", "torchvision.io",
    "transformers.image_utils.load_image", "transformers.video_utils", "transformers.audio_utils",
}  # fmt: skip
# Modules of zoo.data.media whose functions decode in the process that calls them; and a picture that zoo has drawn.
IN_THIS_PROCESS = {"decode", "decoder.InProcessDecoder", "images.rgb_of", "audio_files.read_wave", "sizes.image_size", "sizes.video_size", "sizes.sound_samples"}  # fmt: skip
OWN_PICTURES = {"zoo/logging/callbacks/trackers.py": {"PIL.Image.open"}}


def decoding(tree: ast.AST) -> Iterator[str]:
    """What a module imports or calls that decodes media, by its full name."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname or alias.name.partition(".")[0]: alias.name if alias.asname else alias.name.partition(".")[0] for alias in node.names}  # fmt: skip
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        else:
            continue
        for name in names:
            if any(name == library or name.startswith(f"{library}.") for library in LIBRARIES):
                yield name
            inner = name.removeprefix("zoo.data.media.")
            if inner != name and any(inner == one or inner.startswith(f"{one}.") for one in IN_THIS_PROCESS):  # fmt: skip
                yield name
    roots = {name.partition(".")[0] for name in DECODERS}
    libraries = {name: full for name, full in known.items() if full.partition(".")[0] in roots}
    for node in ast.walk(tree) if libraries else ():
        if isinstance(node, ast.Attribute | ast.Name):
            first, _, rest = ast.unparse(node).partition(".")
            name = f"{libraries.get(first, first)}.{rest}".rstrip(".")
            if name in DECODERS:
                yield name


def test_no_module_calls_a_decoder_but_those_of_the_workers() -> None:
    wrong = {}
    for folder in ("zoo", "models", "bridges"):
        for path in sorted((REPO / folder).rglob("*.py")):
            name = str(path.relative_to(REPO))
            if not name.startswith("zoo/data/media/"):
                calls = set(decoding(ast.parse(path.read_text()))) - OWN_PICTURES.get(name, set())
                wrong |= {name: calls} if calls else {}
    assert not wrong


@pytest.mark.parametrize(
    "code",
    [
        "from PIL import Image\nImage.open(path)",
        "import PIL.Image\nPIL.Image.open(path)",
        "from PIL.Image import open as load\nload(path)",
        "import soundfile as sf\nread = sf.read",
        "import torchvision.io",
        "from transformers.image_utils import load_image",
        "from zoo.data.media import decode",
        "from zoo.data.media.decoder import Decoder, InProcessDecoder",
    ],
)
def test_a_call_of_a_decoder_is_seen(code: str) -> None:
    assert list(decoding(ast.parse(code)))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Decoders that this process has called."""
    calls: list[str] = []

    def trip(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def tripped(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return call(*arguments, **options)

        return tripped

    monkeypatch.setattr(ImageFile.ImageFile, "load", trip("Image.load", ImageFile.ImageFile.load))
    monkeypatch.setattr(av, "open", trip("av.open", av.open))
    monkeypatch.setattr(soundfile, "SoundFile", trip("SoundFile", soundfile.SoundFile))
    return calls


def write_media(folder: Path) -> Path:
    """Rows with an image that lossy decoders read, a sound and both; returns their file."""
    noise = np.random.default_rng(0)
    rows = []
    for number in range(6):
        Image.fromarray(noise.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(folder / f"{number}.webp")
        soundfile.write(folder / f"{number}.wav", noise.normal(0, 0.1, 8000), 16_000)
        user = {"role": "user", "content": ("<image>", "<audio>", "<image><audio>")[number % 3] + "What?"}
        row: dict[str, Any] = {"messages": [user, {"role": "assistant", "content": str(number)}]}
        row |= {"images": [f"{number}.webp"]} if number % 3 != 1 else {}
        row |= {"audios": [f"{number}.wav"]} if number % 3 != 0 else {}
        rows.append(row)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


@pytest.mark.slow
def test_no_tool_decodes_in_its_own_process(watched: list[str], tmp_path: Path) -> None:
    rows, run = str(write_media(tmp_path)), str(tmp_path / "run")
    settings = [
        "size=tiny", "hardware=cpu", "engine.threads=1", "packing.budget=512", "data.augment=0", "data.workers=1",
        f"data.train=[{rows}]", f"data.eval=[{rows}]", "train.global_batch=2", "train.steps=1", "train.eval_every=1",
        "log.predictions=2", "log.tensorboard=false",
    ]  # fmt: skip
    recipe = zoo.load_recipe("qwen3_omni_sft", [*settings, f"run.dir={run}"])

    def engine() -> Any:
        with zoo.Engine.open(recipe) as opened:
            items = [json.loads(line) for line in Path(rows).read_text().splitlines()]
            for item in items:
                for kind in ("images", "audios"):
                    item |= {kind: [str(tmp_path / name) for name in item[kind]]} if kind in item else {}
            return opened.generate(items, max_new_tokens=1).answers

    tools: dict[str, Callable[[], Any]] = {
        "train": lambda: zoo.train(recipe, in_process=True),
        "generate": lambda: zoo.generate(run, rows, max_new_tokens=1, in_process=True),
        "evaluate": lambda: zoo.evaluate(run, rows, max_new_tokens=1, in_process=True),
        "score": lambda: zoo.score(run, rows, in_process=True),
        "engine": engine,
        "top tokens": lambda: zoo.top_tokens(f"{run}/export", rows, tmp_path / "tokens", top_k=2, in_process=True),
        "transformers": lambda: hf_logprobs(look(f"{run}/export"), rows),
        "inspect": lambda: not main(["inspect", "recipe=qwen3_omni_sft", *settings, f"run.dir={run}"]),
        "init": lambda: not main(["init", f"data={rows}", f"out={tmp_path / 'mine.yaml'}"]),
    }  # fmt: skip
    watched.clear()
    for name, tool in tools.items():
        assert tool(), name
        assert not watched, f"{name}: {set(watched)}"
    assert (Path(run) / "plots" / "predictions.png").is_file()


def scans(side: int, count: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again."""
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * count + data[-2:]


def test_a_prompt_has_the_limits_of_its_recipe(tmp_path: Path) -> None:
    """A JPEG of ten thousand scans takes minutes; the row after it is answered."""
    (tmp_path / "scans.jpg").write_bytes(scans(10_000, 10_000))
    Image.new("RGB", (64, 64), "red").save(tmp_path / "good.png")
    processor, data = build_processor(PROCESSOR_ARCH), DataConfig(row_seconds=1.0)
    messages = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "red"}]

    def prompt(name: str) -> Prompt:
        row = make_row({"messages": messages, "images": [name]}, f"{name}:1", Access(tmp_path))
        return make_prompt(processor, row, data, most=4096)

    assert prompt("good.png").reference == "red"
    began = time.monotonic()
    with pytest.raises(RowError, match="takes longer than 1 s to decode") as caught:
        prompt("scans.jpg")
    assert caught.value.cause == "timeout" and time.monotonic() - began < 10
    assert prompt("good.png").sample.length > 4


def test_a_decoder_that_nobody_gave_has_limits() -> None:
    default = decoder_for(DataConfig())
    assert isinstance(default, DecodingWorkers)
    assert (default.seconds, default.megabytes) == (DataConfig().row_seconds, DataConfig().row_mb)
    for function in (Processor.encode_both, Processor.measure, SampleSource.of_rows, RowEncoder):
        parameter = inspect.signature(function).parameters["decoder"]
        assert parameter.default is None, "which is decoder_for(data)"
