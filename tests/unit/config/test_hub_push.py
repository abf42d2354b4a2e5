"""What is pushed to the hub: a real client, and a small hub on this machine."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import config
from huggingface_hub import constants
from support import hub_server
from support.hub_server import STRANGER, TOKEN, Hub

from zoo.config import hub
from zoo.config.compose import load_recipe
from zoo.config.hub import check_push, push
from zoo.config.validate import validate
from zoo.errors import UserError
from zoo.launch import launcher
from zoo.logging.result import TrainResult
from zoo.tools.convert import convert


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server.serve() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        for module in (constants, config):  # tests run with HF_HUB_OFFLINE set
            monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # whose chunks this hub does not take
        monkeypatch.setattr(hub, "getproxies", dict)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "*")
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export = tmp_path / "run" / "export"
    (export / "additional_chat_templates").mkdir(parents=True)
    (export / "config.json").write_text("{}")
    (export / "additional_chat_templates" / "tools.jinja").write_text("{{ x }}")
    (export / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    return export


def test_files_of_any_size_arrive_in_a_private_repository(served: Hub, folder: Path) -> None:
    check_push("me/mine", "hub.repo", private=True)
    assert served.repos["me/mine"] == {"private": True, "files": {}}
    url = push(folder, "me/mine", "hub.repo", private=True)
    assert url.startswith(f"{served.url}/me/mine/commit/")
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert served.files("me/mine") == files and served.repos["me/mine"]["private"]
    check_push("me/mine", "hub.repo", private=True)  # which is there by now
    push(folder, "me/open", "push_to", private=False)
    assert not served.repos["me/open"]["private"]


@pytest.mark.parametrize(
    ("repo", "token", "words"),
    [
        *((name, TOKEN, "wanted owner/name") for name in ("mine", "me/", "me/a/b", "me/a b", "me/a--b", "me/a.git", "https://x/y")),
        ("you/mine", TOKEN, "the token may not write there; check the owner's name"),
        ("me/theirs", STRANGER, "the token may not write there"),
        ("me/mine", "hf_typo", "the hub does not know this token; run `hf auth login`"),
        ("me/mine", None, "no token for the hub; run `hf auth login`, or set HF_TOKEN"),
        ("me/public", TOKEN, "this repository is public.*private=false"),
    ],
)  # fmt: skip
def test_mistakes_are_found_before_training(
    repo: str, token: str | None, words: str, served: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served.repos |= {"me/public": {"private": False, "files": {}}, "me/theirs": {"private": True, "files": {}}}
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=f"hub.repo={repo}: .*{words}"):
        check_push(repo, "hub.repo", private=True)


def test_a_hub_out_of_reach_is_said_before_training(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"hub.repo=me/mine: the hub is out of reach \(HF_HUB_OFFLINE is set\); leave hub.repo out"
    ):
        check_push("me/mine", "hub.repo", private=True)
    assert not served.asked


def test_a_refused_push_names_the_command_that_tries_again(served: Hub, folder: Path) -> None:
    check_push("me/mine", "hub.repo", private=True)
    served.broken = True
    with pytest.raises(
        UserError,
        match=rf"{folder} is written, but the hub did not take it: .*try again: hf upload me/mine {folder} --private",
    ):
        push(folder, "me/mine", "hub.repo", private=True)


def test_an_adapter_whose_base_is_a_folder_here_is_said(
    served: Hub, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for base, said in (("/data/base", True), ("org/base", False)):
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        push(folder, "me/mine", "hub.repo", private=True)
        assert ("belongs to /data/base, a folder that is not pushed" in capfd.readouterr().err) == said


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_rank_pushes_what_a_run_has_exported(
    rank: str, served: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    recipe = load_recipe("qwen3_sft", ["size=tiny", "hub.repo=me/mine"])
    run = folder.parent
    result = TrainResult(
        losses=[],
        run_dir=str(run),
        steps=1,
        checkpoint=None,
        metrics={},
        interrupted=False,
        preempted=False,
        stopped=None,
    )
    for export, pushed in ((None, False), (str(folder), rank == "0")):
        (run / "summary.json").write_text(json.dumps({"export": export}))
        assert launcher._pushed(recipe, result) is result
        assert ("me/mine" in served.repos) == pushed == ("pushed to http" in capfd.readouterr().out)


def test_keys_that_say_nothing_are_refused() -> None:
    recipe = load_recipe("qwen3_sft", ["size=tiny"])
    with pytest.raises(UserError, match=r"hub\.repo=typo: wanted owner/name"):
        validate(recipe.replace({"hub.repo": "typo"}), 1)
    with pytest.raises(UserError, match="max_shard_size=5 apples: wanted a number of bytes"):
        validate(recipe.replace({"max_shard_size": "5 apples"}), 1)
    assert validate(replace(recipe, max_shard_size="2GiB"), 1).max_shard_size == "2GiB"


def test_a_conversion_checks_the_hub_first(served: Hub, tmp_path: Path) -> None:
    from support.tiny_qwen3 import write_tiny_qwen3

    source = write_tiny_qwen3(tmp_path / "source")
    with pytest.raises(UserError, match="push_to=you/mine: the token may not write there"):
        convert(source, tmp_path / "fp8", dtype="fp8", push_to="you/mine", quiet=True)
    assert not (tmp_path / "fp8").exists()
    convert(source, tmp_path / "fp8", dtype="fp8", push_to="me/mine", max_shard_size="20KB", quiet=True)
    assert served.files("me/mine").keys() >= {"config.json", "model.safetensors.index.json", "tokenizer.json"}
    assert served.repos["me/mine"]["private"]
