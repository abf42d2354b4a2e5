"""What tables of whole models share of which the thinker is trained: its names when it is alone, and config.json of an export."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from zoo.types import JsonMapping, JsonObject

# Names as transformers saves a thinker by itself -> those of the whole model.
THINKER_ALONE = {name: f"thinker.{name}" for name in ("model.", "lm_head.", "visual.", "audio_tower.")}


def whole_config(kind: str, speaking: str, silent: str) -> Callable[[JsonObject, Collection[str]], JsonObject]:
    """A bridge's `export_config`: the whole model's config.json, of model_type `kind`.

    A thinker's own config is wrapped, as ours are the published names, which begin with `thinker.`; the special token ids
    outside the thinker then have HF's defaults. `speaking` and `silent` are the classes of `architectures` with a talker in the
    weights and without one, when HF must not build one either (enable_audio_output).
    """

    def export_config(config: JsonObject, names: Collection[str]) -> JsonObject:
        if config.get("model_type") == f"{kind}_thinker":
            thinker = {key: value for key, value in config.items() if key != "architectures"}
            config = {"model_type": kind, "thinker_config": thinker}
        speaks = any(name.startswith("talker.") for name in names)
        return {**config, "architectures": [speaking if speaks else silent], "enable_audio_output": speaks}

    return export_config


def module_names(thinker: str) -> Callable[[JsonMapping], Mapping[str, str]]:
    """A bridge's `module_names`: a thinker by itself, of model_type `thinker`, has no name."""
    return lambda config: {"thinker.": ""} if config.get("model_type") == thinker else {}
