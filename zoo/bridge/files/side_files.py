"""What lies beside the weights of a Hugging Face folder: copied from the source, or made where the source has none.

generation_config.json names the tokens that training taught as ends: a base model's own names the end of a text alone, at which
an answer does not end. Without one, it is made of the tokenizer's files and the config, too: `generate` of a model whose config
names no end of sequence generates up to its limit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from zoo.config.locate import TEMPLATES, refuse_links_outside
from zoo.errors import ConfigError, UserError
from zoo.files import read_object
from zoo.types import JsonMapping, JsonObject

# Tokenizer, processor, chat template, generation config. No pickles, no code, no model card.
_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_NOT_COPIED = ("config.json", "zoo_files.json", "zoo_conversion.json")  # each export writes its own
GENERATION, CARD = "generation_config.json", "README.md"
MARK = "<!-- written by zoo: remove this line, and zoo keeps your text when it writes this folder again -->"
_LICENCE = re.compile(r"(license(?:_name|_link)?):\s*[\"']?([\w.:/+-]{1,200})[\"']?\s*")
_LINK = re.compile(r"(?:https?://)?[^:]+")  # a page, or a file beside the card
_MOST = 2**28  # bytes of a file that is copied: the largest published tokenizer has 33 MB
_LONGEST = 2**27  # bytes of a tokenizer's file that are read
_OLD = 2**16  # bytes of a card that are looked through


def copy_side_files(source: Path, target: Path, further: Collection[str] = ()) -> None:
    """Tokenizer, processor, chat templates and generation config, as they are, and files of the names in `further`.

    Raises:
        ConfigError: one is no regular file, is too large for what it should be, or is a link to somewhere else.
    """
    refuse_links_outside(source)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            if path.name == TEMPLATES:
                (target / path.name).mkdir()
                for template in sorted(path.iterdir()):
                    _copy(template, target / path.name / template.name)
        elif path.suffix in _SUFFIXES and path.name not in _NOT_COPIED:
            if not path.name.endswith(".index.json") and not path.name.startswith("."):
                _copy(path, target / path.name)
        elif path.name in further or path.name.upper().startswith("LICENSE"):
            _copy(path, target / path.name)


def _copy(path: Path, target: Path) -> None:
    """Copy a regular file of at most _MOST bytes; a device or pipe is not read, and a file that grows is not followed."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST:
            raise ConfigError(
                f"{path}: wanted a regular file of at most {_MOST:,} bytes; remove it if it is not the model's"
            )
        target.write_bytes(file.read(status.st_size))


def write_generation_config(folder: Path, config: JsonMapping, ends: Sequence[int] = ()) -> None:
    """Write generation_config.json into a folder with a tokenizer's files that has none, or add `ends` to the one it has.

    `config` is the model's config.json, `ends` are token ids that end an answer. Nothing is written where no end is known: then
    transformers goes by the config. Where the file is, transformers and vLLM stop at its ends, whatever config.json says.
    """
    if (folder / GENERATION).exists():
        _add_ends(folder / GENERATION, ends)
        return
    fast = _read(folder / "tokenizer.json")
    special, model = _special_tokens(folder, fast), fast.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    known = {**(vocabulary if isinstance(vocabulary, dict) else {}), **special}
    named = {name: known.get(_token(folder, f"{name}_token")) for name in ("eos", "bos", "pad")}
    named = {name: number if type(number) is int else None for name, number in named.items()}
    stated = {name: list(_stated(config, f"{name}_token_id")) for name in named}
    if special:  # a config may have its class's defaults, which mean something else to this tokenizer
        stated = {name: [n for n in ids if n in special.values()] for name, ids in stated.items()}
    eos = [n for n in dict.fromkeys([named["eos"], *ends, *stated["eos"]]) if n is not None]
    if not eos:
        return
    settings: JsonObject = {"eos_token_id": eos[0] if len(eos) == 1 else eos}
    for name in ("bos", "pad"):
        ids = [n for n in (named[name], *stated[name]) if n is not None]
        if ids:
            settings[f"{name}_token_id"] = ids[0]
    settings.setdefault("pad_token_id", eos[0])
    (folder / GENERATION).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _add_ends(path: Path, ends: Sequence[int]) -> None:
    """Have a generation_config.json end at these tokens too; one that does is left as it is."""
    settings = read_object(path, error=ConfigError)
    stated = list(_stated({"eos_token_id": settings.get("eos_token_id")}, "eos_token_id"))
    every = list(dict.fromkeys([*stated, *ends]))
    if every != stated:
        settings["eos_token_id"] = every[0] if len(every) == 1 else every
        path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _stated(config: object, key: str) -> Iterator[int]:
    """The ids of a token in a config and those of its parts that generate text."""
    while isinstance(config, Mapping):
        value = config.get(key)
        for number in value if isinstance(value, list) else [value]:
            if type(number) is int and number >= 0:
                yield number
        config = config.get("thinker_config") or config.get("text_config")


def _read(path: Path) -> JsonMapping:
    """A JSON object; an empty one where there is none that can be read: it is somebody else's file."""
    try:
        return read_object(path, most=_LONGEST)
    except UserError:
        return {}


def _token(folder: Path, name: str) -> str | None:
    """The text of a token that a tokenizer names: eos_token, say."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        value = _read(folder / file).get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            return text
    return None


def _special_tokens(folder: Path, fast: JsonMapping) -> dict[str, int]:
    """Text -> id of the tokens that were added to a tokenizer's vocabulary; `fast` is its tokenizer.json."""
    tokens: dict[str, int] = {}
    added = fast.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and type(entry.get("id")) is int:
            tokens[entry["content"]] = entry["id"]
    decoder = _read(folder / "tokenizer_config.json").get("added_tokens_decoder")
    for number, entry in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and number.isdigit():
            tokens.setdefault(entry["content"], int(number))
    for text, number in _read(folder / "added_tokens.json").items():
        if type(number) is int:
            tokens.setdefault(text, number)
    return tokens


def write_card(folder: Path, former: Path, text: str) -> None:
    """Write a model card into a folder that will take the place of `former`; one that somebody wrote there is kept."""
    old = former / CARD
    if old.is_file() and MARK not in _beginning(old):
        shutil.copyfile(old, folder / CARD)
    else:
        (folder / CARD).write_text(text, encoding="utf-8")


def licence_of(folder: Path) -> dict[str, str]:
    """What the model card of a folder says of its licence: license, license_name, license_link; those that are there."""
    if not (folder / CARD).is_file():
        return {}
    lines = _beginning(folder / CARD).splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    end = next((number for number, line in enumerate(lines[1:], 1) if line.strip() == "---"), 0)
    fields = {match[1]: match[2] for match in map(_LICENCE.fullmatch, lines[1:end]) if match}
    if not _LINK.fullmatch(fields.get("license_link", "")):
        fields.pop("license_link", None)
    return fields


def _beginning(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_OLD).decode(errors="replace")
