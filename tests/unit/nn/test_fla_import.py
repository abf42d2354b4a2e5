"""Modules of flash-linear-attention, here a package laid out as it is, come without the code of the packages around them."""

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zoo.errors import UserError
from zoo.nn.decoder.attention.fla_import import import_fla

FILES = {
    "fla/__init__.py": "import sys\nsys.ran.append('fla')\nfrom fla.layers import Layer\nfrom fla import ops, modules\n",
    "fla/layers/__init__.py": "import sys\nsys.ran.append('layers')\nclass Layer: pass\n",
    "fla/ops/__init__.py": "import sys\nsys.ran.append('ops')\nfrom fla.ops.rule import rule\nfrom fla.layers import Layer\n",
    "fla/ops/rule/__init__.py": "from fla.ops.rule.chunk import rule\n",
    "fla/ops/rule/chunk.py": "from fla.modules.norm import norm\ndef rule(): return norm\n",
    "fla/modules/__init__.py": "import sys\nsys.ran.append('modules')\nfrom fla.layers import Layer\nother = 1\n",
    "fla/modules/norm.py": "norm = 2\n",
}


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The packages whose own code has run."""
    if importlib.util.find_spec("fla"):  # its files would mix with those below; the GPU's tests import it
        pytest.skip("flash-linear-attention is installed, and the package below has its name")
    for name, content in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    found: list[str] = []
    monkeypatch.setattr(sys, "ran", found, raising=False)
    yield found
    for name in [one for one in sys.modules if one.partition(".")[0] == "fla"]:
        del sys.modules[name]


def test_a_module_comes_without_the_packages_around_it(ran: list[str]) -> None:
    module = import_fla("fla.ops.rule")
    assert module.rule() == 2 and not ran
    assert import_fla("fla.ops.rule.chunk") is sys.modules["fla.ops.rule.chunk"]
    assert not ran


def test_what_else_a_package_holds_is_there_when_it_is_asked_for(ran: list[str]) -> None:
    rule = import_fla("fla.ops.rule").rule
    modules = importlib.import_module("fla.modules")
    assert not ran and modules.other == 1 and ran == ["modules", "layers"]
    fla = importlib.import_module("fla")
    assert fla.Layer and fla.ops.rule.rule is rule
    with pytest.raises(AttributeError):
        _ = fla.nothing_of_that_name


def test_a_library_that_is_imported_stays_as_it_is(ran: list[str]) -> None:
    fla = importlib.import_module("fla")
    assert "fla" in ran and import_fla("fla.ops.rule").rule() == 2
    assert sys.modules["fla"] is fla


@pytest.mark.parametrize("lacks", ["fla/modules/__init__.py", None])
def test_a_release_laid_out_otherwise_is_imported_as_a_whole(lacks: str | None, ran: list[str], tmp_path: Path) -> None:
    """One without a package that is stepped over, and one whose modules want what the package's own code makes."""
    (tmp_path / "fla/__init__.py").write_text("import sys\nsys.ran.append('fla')\n__about__ = 7\n")
    (tmp_path / "fla/ops/__init__.py").write_text("")
    (tmp_path / "fla/ops/rule/chunk.py").write_text("from fla import __about__\ndef rule(): return __about__\n")
    if lacks:
        shutil.rmtree((tmp_path / lacks).parent)
    assert import_fla("fla.ops.rule").rule() == 7 and ran == ["fla"]


def test_a_package_that_fails_within_it_is_told(ran: list[str], tmp_path: Path) -> None:
    """As TileLang does, which the library imports where it is, with another apache-tvm-ffi than it wants."""
    (tmp_path / "fla/modules/norm.py").write_text("raise RuntimeError('no enum at NONE')\n")
    told = r"flash-linear-attention can't be imported: RuntimeError: no enum at NONE; `pip check` names packages"
    with pytest.raises(UserError, match=told):
        import_fla("fla.ops.rule")
    with pytest.raises(ImportError):
        import_fla("fla.nothing_of_that_name")
