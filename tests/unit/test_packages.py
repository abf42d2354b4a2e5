"""The sentence about an installed version outside the range that zoo declares."""

from collections.abc import Callable
from pathlib import Path

import pytest

import zoo.packages
from zoo.cli.main import main
from zoo.errors import UserError
from zoo.packages import check_versions

RANGES = [
    "torch>=2.10",
    "transformers<5.25,>=5.17",
    "megatron-core<0.20,>=0.19.2",
    "pillow>=11.3",
    'peft>=99; extra == "dev"',
]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The check, with versions of packages given by name (megatron_core="0.20")."""

    def check(**given: str | None) -> None:
        installed = {"torch": "2.11.0", "transformers": "5.17.0", "megatron-core": "0.19.2", "pillow": "1.0"}
        installed |= {name.replace("_", "-"): number for name, number in given.items()}
        monkeypatch.setattr(zoo.packages, "_declared", lambda: RANGES)
        monkeypatch.setattr(zoo.packages, "installed_version", lambda *names: installed[names[0]])
        check_versions.__wrapped__()

    return check


@pytest.mark.parametrize(
    "inside",
    [{}, {"torch": "2.15.0+cu130"}, {"torch": "2.10.0a0+nv26.1"}, {"transformers": "5.24.1"}, {"torch": "3.0"}],
)
def test_a_version_inside_the_range_is_taken(inside: dict[str, str], checked: Callable[..., None]) -> None:
    checked(**inside)


@pytest.mark.parametrize(
    ("outside", "said"),
    [
        ({"torch": "2.9.1+cpu"}, "torch: 2.9.1+cpu is installed; zoo works with >=2.10; pip install 'torch>=2.10'"),
        ({"transformers": "5.25.0"}, "transformers: 5.25.0 is installed; zoo works with <5.25,>=5.17; "),
        ({"transformers": "4.57.0"}, "transformers: 4.57.0 is installed"),
        ({"megatron_core": "0.20.0rc1"}, "megatron-core: 0.20.0rc1 is installed; zoo works with <0.20,>=0.19.2; "),
        ({"torch": None}, "torch: not installed; zoo works with >=2.10"),
    ],
)
def test_a_version_outside_the_range_is_one_sentence(
    outside: dict[str, str | None], said: str, checked: Callable[..., None]
) -> None:
    with pytest.raises(UserError) as error:
        checked(**outside)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_ranges_are_those_of_the_clone_or_of_the_metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    declared = zoo.packages._declared()
    assert any(line.startswith("torch>=") for line in declared)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n')
    monkeypatch.setattr(zoo.packages, "__file__", str(tmp_path / "zoo" / "packages.py"))
    monkeypatch.setattr(zoo.packages, "requires", lambda name: ["torch>=7"])
    assert zoo.packages._declared() == ["torch>=7"]


def test_the_command_line_and_the_api_refuse_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(zoo.packages, "installed_version", lambda *names: "0.1")
    check_versions.cache_clear()
    try:
        assert main(["list"]) == 2
        assert "0.1 is installed; zoo works with" in capsys.readouterr().err
        with pytest.raises(UserError, match="zoo works with"):
            zoo.load_recipe  # noqa: B018
    finally:
        check_versions.cache_clear()
