"""A model folder of somebody else's: none of its code runs, its templates reach nothing of Python, its texts stay texts."""

import io
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.fuzz import memory_below

from zoo.bridge import CheckpointError, SafetensorsFolder
from zoo.config.compose import load_recipe
from zoo.config.entries import DataEntry
from zoo.config.locate import SETTINGS
from zoo.data.errors import RowError
from zoo.data.sources import hub
from zoo.data.sources.references import Access
from zoo.data.sources.rows import make_row
from zoo.data.sources.streams import open_stream
from zoo.data.sources.tables import open_table
from zoo.errors import ConfigError, UserError
from zoo.models.qwen3_omni.processor import build_processor

ROW = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "7"}]}
AUTO_MAPS: dict[str, dict[str, Any]] = {
    "processor_config.json": {"processor_class": "Evil", "auto_map": {"AutoProcessor": "evil.Evil"}},
    "preprocessor_config.json": {"image_processor_type": "Evil", "auto_map": {"AutoImageProcessor": "evil.Evil"}},
    "tokenizer_config.json": {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}},
    "config.json": {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoProcessor": "evil.Evil"}},
}
TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch %s') }}",
    "{{ lipsum.__globals__['os'].popen('touch %s').read() }}",
    "{{ ''|attr('__class__') }}",
    "{{ '{0.__class__.__base__}'.format('') }}",
    "{{ strftime_now.__globals__ }}",
    "{{ raise_exception.__closure__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch %s') }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{% for",
    "",
]


@pytest.fixture
def folder(processor: Any, tmp_path: Path) -> Path:
    processor.save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", AUTO_MAPS)
def test_code_of_a_folder_never_runs_and_nobody_is_asked(
    name: str, folder: Path, arch: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, ran = folder / name, tmp_path / "ran"
    written = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**written, **AUTO_MAPS[name]}))
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil:\n    pass\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    try:
        assert type(build_processor(arch, str(folder)).hf).__module__.startswith("transformers.")
    except ConfigError as error:
        assert "no processor can be loaded" in str(error) and "\n" not in str(error)
    assert not ran.exists() and sys.stdin.read(1) == "y"


DEEP = '{"a": ' + "[" * 900 + "]" * 900 + "}"


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_have_a_depth_and_a_size_and_are_plain_files(name: str, folder: Path, arch: dict) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(DEEP)
    with pytest.raises(ConfigError, match="nested too deeply; at most 64"):
        build_processor(arch, str(folder))
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ConfigError, match="is no plain file"):
        build_processor(arch, str(folder))
    (folder / name).unlink()
    (folder / name).write_text(f'{{"a": "{"x" * 2**24}"}}')
    with pytest.raises(ConfigError, match="over 16,777,216 bytes") as caught:
        build_processor(arch, str(folder))
    assert "\n" not in str(caught.value)


def test_a_vocabulary_has_a_size(folder: Path, arch: dict) -> None:
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(2**28 + 1)
    with pytest.raises(ConfigError, match="a plain file of at most 268,435,456 bytes"):
        build_processor(arch, str(folder))


@pytest.mark.parametrize("text", ["{}", "[" * 100_000, '{"version": "1.0"}', "\ufeff", ""])
@pytest.mark.parametrize("name", ["tokenizer.json", "processor_config.json"])
def test_broken_files_are_refused_in_a_sentence(name: str, text: str, folder: Path, arch: dict) -> None:
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=r"no processor can be loaded|is wanted"):
        build_processor(arch, str(folder))


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_reach_nothing_of_python(template: str, folder: Path, arch: dict, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (folder / "chat_template.jinja").write_text(template.replace("%s", str(ran)))
    row = make_row(ROW, "x:1", Access(tmp_path))
    try:
        encode(build_processor(arch, str(folder)), row)
    except UserError as error:
        assert "subclasses" not in str(error) and "root:" not in str(error)
    else:
        pytest.fail("the template writes turns")
    assert not ran.exists()


def encode(processor: Any, row: Any) -> Any:
    return processor.encode(row, video_fps=1.0, max_frames=2)


def test_texts_of_a_config_are_no_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment's secret would go into config.yaml, and into what is exported."""
    monkeypatch.setenv("SECRET", "s3cret")
    text = "${oc.env:SECRET} ${model.init} ${"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "note": text, "deep": {"er": [text]}}))
    recipe = load_recipe("qwen3_vl_sft", [f"model.init={tmp_path}"])
    assert recipe.model.arch["note"] == recipe.model.arch["deep"]["er"][0] == text


class Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (str(self.file), "w")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt"])
def test_pickles_are_never_read(name: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / name).write_bytes(pickle.dumps({"a": Evil(ran)}))
    with pytest.raises(CheckpointError):
        SafetensorsFolder(tmp_path)
    assert not ran.exists()
    shutil.rmtree(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_folders_of_a_data_set_name_files_of_their_own(tmp_path: Path) -> None:
    for name, text in (("mine", "mine"), ("secret", "secret")):
        datasets.Dataset.from_list([{"text": text}]).save_to_disk(str(tmp_path / name))
        splits = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": text}])})
        splits.save_to_disk(str(tmp_path / f"{name}_splits"))
    assert opened(tmp_path / "mine")[0].text == opened(tmp_path / "mine_splits")[0].text == "mine"
    state = tmp_path / "mine" / "state.json"
    (file,) = (tmp_path / "secret").glob("*.arrow")
    for stranger in (f"../secret/{file.name}", str(file), "..", "", 7):
        written = {**json.loads(state.read_text()), "_data_files": [{"filename": stranger}]}
        state.write_text(json.dumps(written))
        with pytest.raises(UserError, match="files of the same folder are wanted"):
            opened(tmp_path / "mine")
    (tmp_path / "mine_splits" / "dataset_dict.json").write_text('{"splits": ["../secret"]}')
    with pytest.raises(UserError, match=r"names \.\./secret; files of the same folder"):
        opened(tmp_path / "mine_splits")
    state.write_text("[" * 100_000)
    with pytest.raises(UserError, match="nested too deeply"):
        opened(tmp_path / "mine")


def test_a_kilobyte_of_parquet_that_stands_for_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "PARQUET_MB", 512)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array(["x" * 1_000_000]))
    pq.write_table(pa.table({"text": text}), tmp_path / "bomb.parquet", store_schema=False)
    assert (tmp_path / "bomb.parquet").stat().st_size < 100_000
    with memory_below(1024), pytest.raises(UserError, match="it takes over 512 MiB to unpack"):
        opened(tmp_path / "bomb.parquet")
    assert sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file()) < 2**20


def opened(path: Path) -> Any:
    return open_table(DataEntry(path=str(path)), Access, print, evaluation=False, key="data.train")


@pytest.mark.parametrize("stream", [False, True])
def test_a_column_of_text_that_is_no_utf8(stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    text = pa.array([b"one", b"\xae\xff", b"three"]).view(pa.string())
    pq.write_table(pa.table({"text": text}), tmp_path / "x.parquet")
    entry = DataEntry(path=str(tmp_path / "x.parquet"), stream=stream)
    open_ = (
        (lambda: open_stream(entry, Access, evaluation=False, key="data.train"))
        if stream
        else lambda: opened(tmp_path / "x.parquet")
    )
    rows = open_()
    assert (rows[0].text, rows[2].text) == ("one", "three")
    with pytest.raises(RowError, match=r"x\.parquet:2: the row can't be read: 'utf-8' codec"):
        rows[1]
