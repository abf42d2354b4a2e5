"""The Hugging Face processor that an export carries: it reads media and writes chats as the run did, as far as its files can say so.

Limits of pixels, frames a second and most frames go to the image and the video processor, arguments of the chat template become its
defaults. Which frames of a video a processor takes at that rate is its own affair.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.config.entries import PixelLimits
from zoo.config.schema import DataConfig, EmbedConfig
from zoo.data.media.sampling import MIN_FRAMES
from zoo.data.processors.text import TextOnly
from zoo.files import read_object
from zoo.model.embedding_files import write_embedding_files
from zoo.model.run_settings import RunSettings, write_settings
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from zoo.data.processors.processor import Processor

type Template = str | dict[str, Template]
"""A chat template, or several by name."""

FILES = {"image_processor": "preprocessor_config.json", "video_processor": "video_preprocessor_config.json"}
TEMPLATE_FILE = "chat_template.json"  # of earlier transformers
PIXELS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # names of earlier transformers


class ServedProcessor:
    """What `save_pretrained` of an export writes in the place of the run's processor.

    Args:
        processor: a `zoo.data.processors.processor.Processor`.
        settings: those of the run.
        width: hidden size of the model, where it embeds.
    """

    def __init__(self, processor: Processor, settings: RunSettings, width: int = 0) -> None:
        self.settings, self._width, self._kinds = settings, width, processor.modalities
        self._changes = _changes(processor, settings)
        self._template = _with_defaults(processor.hf.chat_template, settings.values.get("data.template") or {})
        self.hf = _changed(processor.hf, self._changes, self._template)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the processor's files and the settings into a folder, which may have files of the source: these say the same then."""
        self.hf.save_pretrained(folder)
        write_settings(self.settings, Path(folder))
        if embed := {
            key.removeprefix("embed."): value for key, value in self.settings.values.items() if key.startswith("embed.")
        }:
            write_embedding_files(Path(folder), EmbedConfig(**embed), self._width, self._kinds)
        for part, name in FILES.items():
            if part in self._changes:
                _patch(Path(folder) / name, self._changes[part])
        _patch(Path(folder) / TEMPLATE_FILE, {"chat_template": self._template})


def _changes(processor: Processor, settings: RunSettings) -> dict[str, JsonObject]:
    """Attributes that the run's settings change, by part of the processor."""
    values = {name: settings.values.get(f"data.{name}") for name in ("min_pixels", "max_pixels", "video_max_pixels")}
    limits = PixelLimits(values["min_pixels"], values["max_pixels"], values["video_max_pixels"])
    changes: dict[str, JsonObject] = {}
    for name, stored in processor.stored_limits(limits).items():
        changes[name.replace("s_kwargs", "_processor")] = dict(stored)
    videos = getattr(processor.hf, "video_processor", None)
    if videos is not None and "video" in processor.modalities:
        default = DataConfig()
        fps = settings.values.get("data.video_fps", default.video_fps)
        most = settings.values.get("data.max_frames", default.max_frames)
        wanted = {"fps": fps, "num_frames": None, "max_frames": most, "min_frames": MIN_FRAMES, "initial_shift": False}
        video_changes = changes.setdefault("video_processor", {})
        video_changes |= {name: value for name, value in wanted.items() if hasattr(videos, name)}
        # Processors that take all frames of a video by default do so unless the run was asked for another rate.
        if (fps, most) != (default.video_fps, default.max_frames) or type(videos).do_sample_frames:
            video_changes["do_sample_frames"] = True
    return changes


def _with_defaults(template: Template, arguments: JsonMapping) -> Template:
    """A chat template whose arguments have these values where a call gives no others."""
    if isinstance(template, Mapping):
        return {name: _with_defaults(variant, arguments) for name, variant in template.items()}
    defaults = [
        f"{{%- set {name} = {name} if {name} is defined else {_literal(value)} %}}"
        for name, value in arguments.items()
        if name.isidentifier()
    ]
    return "".join([*defaults, template])


def _literal(value: object) -> str:
    """A value as Jinja writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _changed(
    hf: ProcessorMixin | TextOnly, changes: Mapping[str, JsonMapping], template: Template
) -> ProcessorMixin | TextOnly:
    """A copy of a processor with other attributes of its parts and another chat template."""
    if isinstance(hf, TextOnly):
        tokenizer = copy.copy(hf.tokenizer)
        tokenizer.chat_template = template
        return TextOnly(tokenizer)
    changed = copy.copy(hf)
    changed.chat_template = template
    for name, attributes in changes.items():
        part = copy.copy(getattr(hf, name))
        for key, value in attributes.items():
            former = getattr(part, key)
            setattr(part, key, type(former)(**value) if isinstance(value, dict) else value)
        setattr(changed, name, part)
    return changed


def _patch(path: Path, changes: JsonMapping) -> None:
    """Change keys of a JSON file of the source, if there is one."""
    if not path.is_file():
        return
    settings = read_object(path)
    former = {old: changes["size"][new] for old, new in PIXELS.items() if "size" in changes and old in settings}
    settings |= {**changes, **former}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
