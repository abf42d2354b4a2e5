"""A model folder of somebody else's: none of its code runs, its templates reach nothing of Python, its texts stay texts."""

import io
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zoo.bridge import CheckpointError, SafetensorsFolder
from zoo.config.compose import load_recipe
from zoo.data.refs import Access
from zoo.data.rows import make_row
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


@pytest.mark.parametrize("text", ["{}", "[" * 100_000, '{"version": "1.0"}', "\ufeff", ""])
@pytest.mark.parametrize("name", ["tokenizer.json", "processor_config.json"])
def test_broken_files_are_refused_in_a_sentence(name: str, text: str, folder: Path, arch: dict) -> None:
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match="no processor can be loaded|is wanted"):
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
