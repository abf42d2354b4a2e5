"""What lies beside an export's weights: the end of sequence for `generate`, and a model card that is nobody else's."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from zoo.bridge.files.side_files import (
    CARD,
    GENERATION,
    MARK,
    copy_side_files,
    licence_of,
    write_card,
    write_generation_config,
)
from zoo.config.locate import look
from zoo.errors import ConfigError


def tokenizer(folder: Path, **more: Any) -> None:
    added = [{"id": 7, "content": "<end>", "special": True}, {"id": 8, "content": "<pad>", "special": True}]
    added += [{"id": 9, "content": "<turn>", "special": True}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<end>", "pad_token": {"content": "<pad>"}, **more})
    )


def made(folder: Path, config: dict[str, Any], ends: tuple[int, ...] = ()) -> Any:
    write_generation_config(folder, config, ends)
    path = folder / GENERATION
    return json.loads(path.read_text()) if path.is_file() else None


def test_the_tokenizer_says_where_to_end(tmp_path: Path) -> None:
    tokenizer(tmp_path, bos_token="<turn>")
    assert made(tmp_path, {}) == {"eos_token_id": 7, "pad_token_id": 8, "bos_token_id": 9}


@pytest.mark.parametrize("part", ["text_config", "thinker_config", None])
def test_a_config_counts_as_far_as_its_tokens_are_special(tmp_path: Path, part: str | None) -> None:
    """2 and 1 are defaults of a config's class; here they are letters."""
    tokenizer(tmp_path)
    told = {"eos_token_id": [9, 2], "bos_token_id": 1, "pad_token_id": 1}
    config: dict[str, Any] = {part: told} if part else told
    assert made(tmp_path, config, (9,)) == {"eos_token_id": [7, 9], "pad_token_id": 8}


VOCABULARY = {
    "tokenizer.json": {"model": {"vocab": {"a": 1, "</s>": 2}}},
    "tokenizer_config.json": {"eos_token": "</s>"},
}


@pytest.mark.parametrize(
    ("files", "config", "wanted"),
    [
        (VOCABULARY, {"eos_token_id": 5}, {"eos_token_id": [2, 5], "pad_token_id": 2}),
        ({}, {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": None}, {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 2}),
        ({}, {"eos_token_id": None}, None),
    ],
    ids=["an end in the vocabulary", "no tokenizer: the config is believed", "nothing known"],
)  # fmt: skip
def test_tokens_without_special_ones(
    tmp_path: Path, files: dict[str, Any], config: dict[str, Any], wanted: Any
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert made(tmp_path, config) == wanted


def test_what_the_source_has_stays(tmp_path: Path) -> None:
    tokenizer(tmp_path)
    (tmp_path / GENERATION).write_text('{"temperature": 0.7}')
    assert made(tmp_path, {}) == {"temperature": 0.7}


@pytest.mark.parametrize(
    ("given", "ends", "wanted"),
    [
        ({"eos_token_id": 7, "bos_token_id": 7}, (9,), {"eos_token_id": [7, 9], "bos_token_id": 7}),
        ({"eos_token_id": [9, 7], "top_p": 0.8}, (9, 7), {"eos_token_id": [9, 7], "top_p": 0.8}),
        ({"top_k": 1}, (9,), {"eos_token_id": 9, "top_k": 1}),
        ({"eos_token_id": None}, (9, 7), {"eos_token_id": [9, 7]}),
        ({"eos_token_id": "<end>"}, (9,), {"eos_token_id": 9}),
    ],
)
def test_what_training_taught_is_added(
    tmp_path: Path, given: dict[str, Any], ends: tuple[int, ...], wanted: dict[str, Any]
) -> None:
    tokenizer(tmp_path)
    (tmp_path / GENERATION).write_text(json.dumps(given))
    assert made(tmp_path, {}, ends) == wanted


def test_a_file_that_names_every_end_keeps_its_bytes(tmp_path: Path) -> None:
    (tmp_path / GENERATION).write_text(text := '{"eos_token_id":[9,7],  "top_k":1}')
    made(tmp_path, {}, (7,))
    assert (tmp_path / GENERATION).read_text() == text


@pytest.mark.parametrize("text", ["", "[]", "[" * 10**5, '{"added_tokens": [3, {"id": "x"}]}', "true"])
def test_broken_files_of_a_tokenizer_are_passed_over(tmp_path: Path, text: str) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json"):
        (tmp_path / name).write_text(text)
    assert made(tmp_path, {"eos_token_id": 2}) == {"eos_token_id": 2, "pad_token_id": 2}


def test_transformers_reads_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    from zoo.data.tokenizer import ROOT

    known = AutoTokenizer.from_pretrained(ROOT)
    known.save_pretrained(tmp_path)
    write_generation_config(tmp_path, {"text_config": {"eos_token_id": 2}})
    read = GenerationConfig.from_pretrained(tmp_path)
    assert (read.eos_token_id, read.pad_token_id) == (known.eos_token_id, known.pad_token_id)


def test_a_card_that_somebody_wrote_is_kept(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    new.mkdir()
    old.mkdir()
    write_card(new, old, f"{MARK} 1")
    assert (new / CARD).read_text() == f"{MARK} 1"
    (old / CARD).write_text(f"---\n---\n{MARK}\n2")
    write_card(new, old, f"{MARK} 3")
    assert (new / CARD).read_text() == f"{MARK} 3"
    (old / CARD).write_text("mine")
    write_card(new, old, f"{MARK} 4")
    assert (new / CARD).read_text() == "mine"


def test_the_licence_of_a_card(tmp_path: Path) -> None:
    assert licence_of(tmp_path) == {}
    (tmp_path / CARD).write_text("license: mit\n")
    assert licence_of(tmp_path) == {}
    (tmp_path / CARD).write_text(
        '---\nlicense: other\nlicense_name: "a-b"\nlicense_link: https://x.y/LICENSE\ntags:\n- a\nlicense: a b\n---\nlicense: mit\n'
    )
    assert licence_of(tmp_path) == {"license": "other", "license_name": "a-b", "license_link": "https://x.y/LICENSE"}


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.mark.parametrize(
    "name",
    ["LICENSE", "tokenizer_config.json", "x.txt", "additional_chat_templates", "additional_chat_templates/a.jinja", "model.safetensors", "README.md"],
)  # fmt: skip
def test_links_out_of_a_model_folder_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """A stranger's folder asks for no files of whoever reads it."""
    source, secret = model_folder(tmp_path / "model"), tmp_path / "secrets" / "id_rsa"
    secret.parent.mkdir()
    secret.write_text("secret")
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).symlink_to(secret.parent if name == "additional_chat_templates" else secret)
    (tmp_path / "alias").symlink_to(source)
    for folder in (source, tmp_path / "alias"):
        with pytest.raises(ConfigError, match=rf"model/{name}: a link to .*secrets"):
            look(str(folder))
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="a link to"):
        copy_side_files(source, tmp_path / "out")
    assert not any("secret" in path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file())


def test_links_within_a_model_folder_and_its_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot = model_folder(tmp_path / "models--a--b" / "snapshots" / "0123")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    (blobs / "77").write_text("merges")
    (snapshot / "merges.txt").symlink_to("../../blobs/77")
    (snapshot / "vocab.txt").symlink_to("tokenizer.json")
    assert look(str(snapshot)) is not None
    (tmp_path / "out").mkdir()
    copy_side_files(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "merges.txt").read_text() == "merges"
    assert not (tmp_path / "out" / "merges.txt").is_symlink()


@pytest.mark.parametrize("what", ["a pipe", "a large file", "a template that is a pipe"])
def test_what_is_no_plain_file_is_not_copied(what: str, tmp_path: Path) -> None:
    source, out = model_folder(tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    if what == "a large file":
        with (source / "x.txt").open("wb") as file:
            file.truncate(2**40)
    elif what == "a pipe":
        os.mkfifo(source / "x.txt")
    else:
        (source / "additional_chat_templates").mkdir()
        os.mkfifo(source / "additional_chat_templates" / "a.jinja")
    with pytest.raises(ConfigError, match="wanted a regular file of at most"):
        copy_side_files(source, out)
