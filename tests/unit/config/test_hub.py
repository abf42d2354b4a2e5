"""A hub out of reach is one sentence at once: nothing is tried again, and the process is left as it was."""

import socket
import sys
from types import ModuleType
from typing import Any

import pytest
from huggingface_hub import constants

from zoo.config import hub
from zoo.config.entries import DataEntry
from zoo.config.hub import asking_the_hub
from zoo.config.locate import locate
from zoo.config.schema import ModelConfig, Recipe
from zoo.errors import UserError


@pytest.fixture
def out_of_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """An address here where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "getproxies", dict)


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run with HF_HUB_OFFLINE set."""
    from datasets import config

    for module in (constants, config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)


WORDS = r"the hub is out of reach \(no connection to 127.0.0.1: Connection refused\), "


def asked(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> str:
    return "".join([*capfd.readouterr(), caplog.text])


def test_data_sets_imported_meanwhile_are_not_offline_afterwards(
    out_of_reach: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    monkeypatch.delitem(sys.modules, "datasets.config")
    with asking_the_hub() as unreachable:
        assert unreachable
        late = ModuleType("datasets.config")
        vars(late)["HF_HUB_OFFLINE"] = constants.HF_HUB_OFFLINE
        monkeypatch.setitem(sys.modules, "datasets.config", late)
    assert vars(late)["HF_HUB_OFFLINE"] is constants.HF_HUB_OFFLINE is False


def test_a_model(out_of_reach: None, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match=f"^model.init=org/name: no folder here, and {WORDS}and no copy of it"):
        locate("org/name", key="model.init")
    assert asked(capfd, caplog) == ""
    assert constants.HF_HUB_OFFLINE is False


def test_a_plan(out_of_reach: None, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    from zoo.planner.plan import as_planned

    assert as_planned(Recipe(model=ModelConfig(family="llava", init="org/name"))) is None
    assert asked(capfd, caplog) == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_data_set(
    stream: bool, out_of_reach: None, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from datasets import config

    from zoo.data.sources.hub import load_hub

    with pytest.raises(UserError, match=f"^data.train=org/name: the data set can't be loaded: .*; {WORDS}so the cache"):
        load_hub(DataEntry(hub="org/name", stream=stream), "data.train")
    assert asked(capfd, caplog) == ""
    assert config.HF_HUB_OFFLINE is False and constants.HF_HUB_OFFLINE is False


def test_offline_by_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"the hub is out of reach \(HF_HUB_OFFLINE is set\)"):
        locate("org/name")
    assert constants.HF_HUB_OFFLINE is True


def test_a_hub_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setattr(hub, "getproxies", dict)
        with asking_the_hub() as unreachable:
            assert unreachable is None and constants.HF_HUB_OFFLINE is False
    monkeypatch.setattr(hub, "getproxies", lambda: {"http": "http://proxy:3128"})
    monkeypatch.setattr(hub, "proxy_bypass", lambda host: False)
    with asking_the_hub() as unreachable:
        assert unreachable is None
