"""What a path or hub id of weights is: a Hugging Face folder, zoo's own weights, or a training run's checkpoint.

    Hugging Face      FOLDER/config.json, beside the weights
    zoo's own         FOLDER/zoo.json, weights/ and hf/ (see zoo.bridge.native)
    of a run          RUN/checkpoints/iter_N/state.json and hf/; RUN stands for its newest. Where it holds adapters, what
                      they belong to is in RUN/base/, or where the run's model.init says

Imports no torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zoo.config.architecture import check_arch
from zoo.config.checks.media_sizes import check_media_sizes
from zoo.config.hub import asking_the_hub
from zoo.errors import ConfigError, UserError, printable
from zoo.files import Hold, expanded, read_object
from zoo.records import Check, are_texts, conforms, is_count, is_flag, is_number, is_object, is_text, read_record
from zoo.types import JsonObject

ABOUT, STATE, HF_PART, WEIGHTS_PART = "zoo.json", "state.json", "hf", "weights"
TEMPLATES = "additional_chat_templates"  # folder of a Hugging Face folder
BASE = "base"  # folder in a run's, of what its adapters belong to
_QUANTISED = ("quantization_config", "compression_config")  # keys of a config.json
# Files beside the weights that transformers reads. What is within a vocabulary, the tokenizers library bounds.
SETTINGS = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.json", "generation_config.json",
)  # fmt: skip
PROCESSOR_SETTINGS = "processor_config.json"  # of three of them, of media
VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
MOST_VOCABULARY = 2**28
_TRIES = 10  # times that a run's checkpoints are listed again, each having been removed before it could be held
LONGEST_STATE = 2**28  # bytes of a state.json, which has the position in the data
_STATE_FIELDS: dict[str, Check] = {
    "step": is_count, "total_steps": is_count, "ranks": is_count, "train_steps": is_count, "updates": is_count,
    "model": is_object, "data": is_object, "bad_steps": is_object, "callbacks": is_object,
}  # fmt: skip
_LORA: dict[str, Check] = {
    "rank": is_count, "alpha": is_number, "rslora": is_flag, "dora": is_flag, "rank_pattern": is_object, "alpha_pattern": is_object, "targets": are_texts, "parts": are_texts, "whole_parts": are_texts,
}  # fmt: skip
_ORIGIN: dict[str, Check] = {
    "init": is_text, "mtp_loss": is_number, "speech_loss": is_number, "fp32": are_texts, "grown_from": is_count, "freeze": are_texts,
    "lora": lambda value: conforms(value, _LORA, ("rank",)),
}  # fmt: skip
_ITERATION = re.compile(r"iter_(\d+)")


@dataclass(frozen=True)
class Place:
    """Where weights lie."""

    kind: Literal["hf", "zoo", "run"]
    folder: Path
    files: Path  # folder with config.json and the files of tokenizer and processor
    # of a run's checkpoint: it stays while this value lives
    hold: Hold | None = field(default=None, compare=False, repr=False)
    grown_from: int = 0  # rows of the embedding there, where the model's has more (model.resize_embeddings)

    @property
    def weights(self) -> Path:
        """Folder of the safetensors; a run's are in another format."""
        return self.folder / WEIGHTS_PART if self.kind == "zoo" else self.folder


def read_arch(folder: Path, origin: str = "") -> JsonObject:
    """The config.json of a folder; `origin` is how the user named it, for messages.

    Raises:
        ConfigError: there is none, none that can be read, or one with numbers out of bounds (`zoo.config.architecture`).
    """
    path, where = folder / "config.json", f"{origin}: " if origin else ""
    if not path.is_file():
        raise ConfigError(f"{where}{path}: no such file; wanted a Hugging Face checkpoint folder")
    try:
        arch = read_object(path, error=ConfigError)
        if not isinstance(arch.get("model_type"), str):
            raise ConfigError(f"{path}: it has no model_type; wanted a Hugging Face model's config.json")
        check_arch(arch, str(path))
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None
    return arch


def quantisation(arch: object) -> list[Any]:
    """What a config.json says of how its weights are quantised, at its top or in any of its parts; empty for a plain one."""
    statements, left = [], [arch]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            statements += [part[key] for key in _QUANTISED if part.get(key) is not None]
            left += [value for key, value in part.items() if key not in _QUANTISED]
        elif isinstance(part, list):
            left += part
    return statements


def unquantised(arch: JsonObject) -> JsonObject:
    """The config.json of the same weights in bf16; the given one where it says nothing of being quantised."""
    if not quantisation(arch):
        return arch

    def plain(part: Any) -> Any:
        if isinstance(part, list):
            return [plain(value) for value in part]
        if isinstance(part, dict):
            return {key: plain(value) for key, value in part.items() if key not in _QUANTISED}
        return part

    return plain(arch) if "torch_dtype" in arch else {"dtype": "bfloat16", **plain(arch)}


def check_side_files(folder: str | Path) -> None:
    """ConfigError where a file beside the weights, which transformers reads, is too big, too deep, no JSON, or asks for huge media."""
    for name in SETTINGS:
        if (path := Path(folder) / name).exists():
            settings = read_object(path, error=ConfigError)
            if name.endswith(PROCESSOR_SETTINGS):
                check_media_sizes(settings, str(path))
    for name in VOCABULARIES:
        path = Path(folder) / name
        if path.exists() and not (path.is_file() and path.stat().st_size <= MOST_VOCABULARY):
            raise ConfigError(f"{path}: wanted a plain file of at most {MOST_VOCABULARY:,} bytes")


def side_file_fault(folder: str | Path) -> str | None:
    """The first file of tokenizer, processor and chat template that can't be read, and why, after transformers has failed to load them."""
    for path in sorted(Path(folder).iterdir()):
        if path.suffix == ".json" and path.name in (*SETTINGS, *VOCABULARIES):
            try:
                content = read_object(path, error=ConfigError, most=MOST_VOCABULARY)
            except ConfigError as error:
                return str(error)
            if path.name == "tokenizer.json" and not {"model", "added_tokens"} <= content.keys():
                return f"{path}: it has no 'model' or no 'added_tokens'; wanted a tokenizer that the tokenizers library has saved"
        elif (path.suffix == ".jinja" or path.name in VOCABULARIES) and path.suffix != ".model":
            try:
                path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                return f"{path}: it is no UTF-8 text ({error.reason} at byte {error.start})"
    return None


def load_from_folder(folder: str | Path, kind: str, files: str, load: Callable[[], Any]) -> Any:
    """A Hugging Face processor or tokenizer (`kind`) of a folder that should hold `files`; ConfigError where there is none."""
    try:
        check_side_files(folder)
        return load()
    except Exception as error:  # of many kinds, by what lies in the folder
        fault = None if isinstance(error, ConfigError) else side_file_fault(folder)
        message = printable(fault or " ".join(str(error).split()), 400)
        text = f"model.init: no {kind} can be loaded from {Path(folder)}: {message}; its folder should hold {files}."
        raise ConfigError(text) from error


def refuse_links_outside(folder: Path) -> None:
    """ConfigError where a file of a model's folder is a link out of it, other than into its hub cache.

    What a link names would be read, and be copied into exports: a stranger's folder could ask for any file of whoever reads it.
    """
    root = folder.resolve()  # models--NAME/snapshots/COMMIT has links into models--NAME/blobs
    allowed = root.parent.parent if root.parent.name == "snapshots" else root
    for part in (root, root / HF_PART, root / WEIGHTS_PART, root / TEMPLATES, root / HF_PART / TEMPLATES):
        for path in [part, *(sorted(part.iterdir()) if part.is_dir() else ())]:
            if path.is_symlink() and not (target := path.resolve()).is_relative_to(allowed):
                raise ConfigError(
                    f"{printable(str(path))}: a link to {printable(str(target))}, which is not in the model's folder; put the "
                    "file itself there if it belongs to the model, else remove the link"
                )


def checkpoints(run_dir: str | Path) -> list[Path]:
    """Whole checkpoints of a run folder, oldest first by the step that each holds, whatever its folder's number."""
    folder = Path(run_dir) / "checkpoints"
    folders = [p for p in folder.glob("iter_*") if _ITERATION.fullmatch(p.name) and (p / STATE).is_file()]
    steps = {path: step_of(path) for path in folders}
    return sorted(folders, key=lambda p: (steps[p], p.name == f"iter_{steps[p]}", p.name))


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's state.json states; the number of its folder where that can't be read."""
    try:
        state = read_object(checkpoint / STATE, most=LONGEST_STATE)
        if conforms(state, {"step": is_count}, ("step",)):
            return int(state["step"])
    except UserError:
        pass  # a damaged file, which the sums name
    return step_in_name(checkpoint.name) or 0


def read_state(checkpoint: Path) -> JsonObject:
    """`state.json` of a checkpoint.

    Raises:
        UserError: it is not what a run writes there.
    """
    hint = "take another checkpoint"
    return read_record(checkpoint / STATE, _STATE_FIELDS, ("step", "model"), hint=hint, most=LONGEST_STATE)


def read_origin(checkpoint: Path) -> JsonObject:
    """What a checkpoint's `state.json` says of its weights: where those come from that are not in it, and what was built.

    Raises:
        UserError: it does not say so.
    """
    weights = read_state(checkpoint).get("weights")
    if not conforms(weights, _ORIGIN, ("init", "mtp_loss")):
        raise UserError(
            f"{checkpoint}: its {STATE} does not say what the weights came from, as a run's does; take another checkpoint"
        )
    return weights


def step_in_name(name: str) -> int | None:
    """The step that a checkpoint's folder is called after; None where it is no such name."""
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match else None


def is_hub_id(text: str) -> bool:
    """Whether it looks like `organisation/name` and is no path here."""
    return text.count("/") == 1 and not text.startswith((".", "/", "~")) and not Path(text).exists()


def look(text: str) -> Place | None:
    """What lies at a path; None where there is nothing that is known.

    Raises:
        ConfigError: a file of it is a link to somewhere else.
    """
    folder = expanded(text)
    if (folder / ABOUT).is_file():
        refuse_links_outside(folder)
        return Place("zoo", folder, folder / HF_PART)
    if (folder / STATE).is_file():
        return _held(folder)
    if (folder / "config.json").is_file():
        refuse_links_outside(folder)
        return Place("hf", folder, folder)
    missing: list[str] = []
    for _ in range(_TRIES):
        listed = checkpoints(folder)
        for checkpoint in reversed(listed):
            if (source := _held(checkpoint)) is not None:
                if missing:
                    note = f"zoo: {folder}: {missing[0]} has just been removed by its run; {checkpoint.name} is read"
                    print(note, file=sys.stderr)
                return source
            missing.append(checkpoint.name)
        if not listed:
            break
    return None


def _held(checkpoint: Path) -> Place | None:
    """A run's checkpoint, which its run does not remove while the result lives; None where it has just done so."""
    try:
        return Place("run", checkpoint, checkpoint / HF_PART, Hold(checkpoint / STATE))
    except FileNotFoundError:
        return None
    except OSError:  # it can't be opened, which whoever reads it says
        return Place("run", checkpoint, checkpoint / HF_PART)


def locate(text: str, revision: str | None = None, key: str = "") -> Place:
    """What lies at a path, or on the hub (which is downloaded).

    Args:
        text: a path or a hub id.
        revision: branch, tag or commit of a hub id.
        key: what the user gave it as, for messages: "model.init".

    Raises:
        UserError: nothing is there, or nothing that is known.
    """
    named = f"{key}={text}" if key else text
    source = look(text)
    if source is not None:
        if revision is not None:
            raise UserError(f"revision={revision}: {text} is a folder here, which has none; leave it out")
        return source
    if (expanded(text) / "adapter_config.json").is_file():
        raise UserError(
            f"{named}: an adapter, without the weights it belongs to; name its run, which stands for both, or train "
            "it further with lora.init, or others on top of it with lora.merge_first"
        )
    if expanded(text).exists():
        raise UserError(
            f"{named}: no config.json, zoo.json or state.json there; wanted a Hugging Face folder, zoo's own weights, "
            "or a run's folder or checkpoint"
        )
    if not is_hub_id(text):
        raise UserError(f"{named}: no such folder; wanted a checkpoint folder or a hub id")
    from huggingface_hub import snapshot_download

    with asking_the_hub() as unreachable:
        try:
            folder = Path(snapshot_download(text, revision=revision))
            return Place("hf", folder, folder)
        except Exception as error:
            why = (
                f"the hub is out of reach ({unreachable}), and no copy of it is in the cache; give a folder, or a connection"
                if unreachable
                else f"no model that the hub gives out ({type(error).__name__}); check the name and the token"
            )
            raise UserError(f"{named}: no folder here, and {why}") from error
