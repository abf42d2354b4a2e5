"""What the dict of a config.json tells of the language model in it: its own part, and its experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text_config(arch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a Hugging Face config: where it lies differs between families."""
    thinker = arch.get("thinker_config")
    if isinstance(thinker, Mapping):
        arch = thinker
    text = arch.get("text_config")
    return text if isinstance(text, Mapping) else arch


def num_experts(arch: Mapping[str, Any]) -> int:
    """Experts of a mixture-of-experts layer; 0 for a dense model, also where its config has such a key.

    transformers has a model type of its own for each decoder with experts, "moe" in its name or "_next" at its end, and
    passes over the key in the config of a dense one.
    """
    text = text_config(arch)
    kind = str(text.get("model_type") or arch.get("model_type") or "moe")
    if "moe" not in kind and not kind.endswith("_next"):
        return 0
    return (
        text.get("num_experts") or text.get("n_routed_experts") or text.get("num_local_experts") or 0
    )  # the last as transformers saves some
