"""Each file that commands read of a run or an export, damaged in each way: a sentence that names it, or a repair."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Zoo

pytestmark = pytest.mark.slow(minutes=4)
SECONDS = 20.0  # of a command, on a busy machine
JSON_VALUES = {"list": b"[1]", "number": b"5", "null": b"null", "object": b"{}"}
type Damage = Callable[[bytes], bytes]


def header(edit: Callable[[dict[str, dict[str, object]]], object]) -> Damage:
    """Damage of a safetensors header: what `edit` makes of its entries."""

    def damage(whole: bytes) -> bytes:
        length = int.from_bytes(whole[:8], "little")
        text = json.dumps(edit(json.loads(whole[8 : 8 + length]))).encode()
        return len(text).to_bytes(8, "little") + text + whole[8 + length :]

    return damage


def first_tensor(**changed: object) -> Damage:
    def edit(entries: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
        name = next(name for name in entries if name != "__metadata__")
        return {**entries, name: {**entries[name], **changed}}

    return header(edit)


DAMAGE: dict[str, Damage] = {
    "empty": lambda whole: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "garbage": lambda whole: b"\x00\xff{[garbage" * 30,
}
OF_JSON: dict[str, Damage] = {name: lambda whole, text=text: text for name, text in JSON_VALUES.items()}
OF_TEMPLATE: dict[str, Damage] = {"half a tag": lambda whole: b"{% if"}
OF_TENSORS: dict[str, Damage] = {
    "header of another type": header(lambda entries: [1]),
    "length of the header": lambda whole: (10**18).to_bytes(8, "little") + whole[8:],
    "shape": first_tensor(shape="x"),
    "negative shape": first_tensor(shape=[-1]),
    "dtype": first_tensor(dtype=5),
    "offsets of another type": first_tensor(data_offsets=["a", None]),
    "offsets behind the end": first_tensor(data_offsets=[0, 10**15]),
}
BY_SUFFIX: dict[str, dict[str, Damage]] = {
    ".bin": {"half": lambda whole: whole[len(whole) // 2 :]},
    ".json": OF_JSON, ".yaml": OF_JSON, ".jsonl": OF_JSON, ".lock": OF_JSON, ".jinja": OF_TEMPLATE, ".safetensors": OF_TENSORS,
}  # fmt: skip
COMMANDS = ("eval", "convert", "train", "generate", "score")
ITERATION = "checkpoints/iter_3"
# File -> commands that can't do without it. To the others it is nothing, or there is a copy to repair it from.
OF_RUN: dict[str, str] = {
    "config.yaml": "train", "run.lock": "", "health.json": "", "train.jsonl": "", "summary.json": "", "env.json": "",
    f"{ITERATION}/state.json": "eval convert train generate score", f"{ITERATION}/index.json": "eval convert train generate score",
    f"{ITERATION}/integrity.json": "eval convert train generate score", f"{ITERATION}/rank0_0.bin": "eval convert train generate score",
    f"{ITERATION}/config.yaml": "", f"{ITERATION}/hf/config.json": "eval convert generate score",
    f"{ITERATION}/hf/processor_config.json": "eval convert generate score", f"{ITERATION}/hf/tokenizer.json": "",
    f"{ITERATION}/hf/tokenizer_config.json": "", f"{ITERATION}/hf/chat_template.jinja": "", f"{ITERATION}/hf/generation_config.json": "",
}  # fmt: skip
OF_EXPORT: dict[str, str] = {
    **dict.fromkeys(("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "processor_config.json"),
                    "eval convert train generate score"),
    "chat_template.jinja": "eval train generate score", "generation_config.json": "eval convert generate",
    "preprocessor_config.json": "eval convert train generate score", "zoo_settings.json": "eval generate score", "zoo_files.json": "",
}  # fmt: skip
# Damage after which a file of these may be one still, or is one for some commands.
VALID_STILL = {
    "config.yaml": ("half",), "tokenizer_config.json": ("object",), "processor_config.json": ("object",), "tokenizer.json": ("object",),
    "preprocessor_config.json": ("object",), "generation_config.json": ("object",), "zoo_settings.json": ("object",),
}  # fmt: skip


class Folders:
    """A finished run with its export, and copies of these with a damaged file."""

    def __init__(self, zoo: Zoo, run: Path, work: Path) -> None:
        self.zoo, self.run, self.work = zoo, run, work

    def damaged(self, name: str, damage: Damage, export: bool) -> Path:
        """A new copy of the run, or of its export, in which the file has the damage."""
        shutil.rmtree(self.work, ignore_errors=True)
        folder = Path(shutil.copytree(self.run / "export" if export else self.run, self.work / "copy"))
        path = folder / name
        if not path.exists():
            path.write_bytes(NOT_ALWAYS_THERE[path.name](folder))
        path.write_bytes(damage(path.read_bytes()))
        if path.name == "run.lock":
            os.utime(path, (0, 0))  # nobody holds it
        return folder

    def command(self, name: str, folder: Path) -> list[str]:
        rows, given = self.zoo.data / "heldout.jsonl", ["data.outside_root=true"]
        match name:
            case "eval":
                return ["eval", str(folder), str(rows), "max_new_tokens=2", *given]
            case "score":
                return ["score", str(folder), str(rows), *given]
            case "generate":
                return ["generate", str(folder), "What?", "max_new_tokens=2"]
            case "convert":
                return ["convert", str(folder), str(self.work / "converted")]
            case "train" if folder.joinpath("checkpoints").exists():
                return self.zoo.train_arguments(folder, *FEW, "train.steps=4", "export=false")
            case "train":
                fresh = self.zoo.train_arguments(self.work / "new", *FEW, "train.steps=1", "export=false")
                return [*(part for part in fresh if not part.startswith("size=")), f"model.init={folder}"]
        return [name, str(folder)]


FEW = ("log.tensorboard=false", "log.predictions=0")
NOT_ALWAYS_THERE: dict[str, Callable[[Path], bytes]] = {
    "run.lock": lambda folder: json.dumps(
        {"token": "t", "host": "h", "machine": "m", "boot": "b", "pid": 1, "born": 2, "time": 1e9}
    ).encode(),
    "health.json": lambda folder: b'{"time": 1e9, "every": 5.0, "ranks": []}',
    "preprocessor_config.json": lambda folder: json.dumps(
        json.loads((folder / "processor_config.json").read_text())["image_processor"]
    ).encode(),
}


@pytest.fixture(scope="module")
def folders(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("whole")
    done = zoo.train(folder / "run", *FEW, "train.steps=3")
    assert done.code == 0, done
    return Folders(zoo, folder / "run", folder / "work")


def check(folders: Folders, command: str, folder: Path, name: str, needed: bool) -> None:
    """The command ends soon: well, or in one sentence that names the file, and leaves nothing half-made."""
    start = time.monotonic()
    done = folders.zoo(*folders.command(command, folder))
    case = (name, command, done)
    assert time.monotonic() - start < SECONDS, case
    assert "Traceback" not in done.out + done.err, case
    if done.code == 0:
        assert not needed, case
        return
    assert done.code == 2 and done.err.startswith("zoo: error: ") and done.err.count("\n") == 1, case
    assert Path(name).name in done.err and len(done.err) < 1000, case
    assert not (folders.work / "converted").exists(), case


@pytest.mark.parametrize(
    ("name", "export"), [*((name, False) for name in OF_RUN), *((name, True) for name in OF_EXPORT)]
)
def test_a_damaged_file_is_named_or_repaired(folders: Folders, name: str, export: bool) -> None:
    needing = (OF_EXPORT if export else OF_RUN)[name].split()
    damages = DAMAGE | BY_SUFFIX.get(Path(name).suffix, {})
    for number, (kind, damage) in enumerate(damages.items()):
        command = COMMANDS[number % len(COMMANDS)]
        folder = folders.damaged(name, damage, export)
        needed = command in needing and kind not in VALID_STILL.get(Path(name).name, ())
        check(folders, command, folder, name, needed and (Path(name).suffix != ".jinja" or kind == "half a tag"))
        if not export and "/" not in name:
            check(folders, "report", folders.damaged(name, damage, export), name, needed=False)
