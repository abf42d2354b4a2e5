"""Train vision-language and omni models on Megatron-Core, with real sequence packing.

    import zoo

    recipe = zoo.load_recipe("qwen3_omni_sft", overrides=["train.steps=100"])
    result = zoo.train(recipe)

Importing this package imports no torch; the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.config.compose import load_recipe
    from zoo.config.schema import (
        DataConfig,
        DistillConfig,
        EmbedConfig,
        EngineConfig,
        HubConfig,
        LogConfig,
        LoraConfig,
        MachineConfig,
        ModelConfig,
        PackingConfig,
        ParallelConfig,
        Recipe,
        RlConfig,
        RunConfig,
        TrainConfig,
        VllmConfig,
    )  # fmt: skip
    from zoo.launch.launcher import launch as train
    from zoo.logging.callbacks.event import Event
    from zoo.logging.result import TrainResult
    from zoo.planner.plan import plan
    from zoo.rl.engine import Engine
    from zoo.tools.convert import convert
    from zoo.tools.evaluate import evaluate
    from zoo.tools.generate import generate
    from zoo.tools.runs.page import report
    from zoo.tools.score import score
    from zoo.tools.serving.comparison import verify_served
    from zoo.tools.speaking.speak import speak
    from zoo.tools.top_tokens import top_tokens
    from zoo.tools.verify import verify

__version__ = "0.1.0"
__all__ = [
    "DataConfig", "DistillConfig", "EmbedConfig", "Engine", "EngineConfig", "Event", "HubConfig", "LogConfig", "LoraConfig", "MachineConfig",
    "ModelConfig", "PackingConfig", "ParallelConfig", "Recipe", "RlConfig", "RunConfig", "TrainConfig", "TrainResult", "VllmConfig", "__version__",
    "convert", "evaluate", "generate", "load_recipe", "plan", "report", "score", "speak", "top_tokens", "train", "verify", "verify_served",
]  # fmt: skip

# models/ lies beside zoo/ in a clone; an install makes it zoo.models.
if importlib.util.find_spec("zoo.models") is None:
    raise ImportError(
        f"zoo is imported from a clone ({os.path.dirname(__file__)}) that is not installed, where zoo.models is missing. Start in "
        "another folder, where an installed zoo is not hidden by this one, or install the clone in place: pip install -e ."
    )

importlib.import_module("zoo.deferred_imports").defer_imports_of_inference()

started_by = os.getppid()  # asked at once: later it may be gone


def _forked() -> None:
    global started_by
    started_by = os.getppid()


os.register_at_fork(after_in_child=_forked)

_SECTIONS = (
    "Data", "Distill", "Embed", "Engine", "Hub", "Log", "Lora", "Machine", "Model", "Packing", "Parallel", "Rl", "Run", "Train", "Vllm",
)  # fmt: skip
_WHERE = {
    **{f"{name}Config": ("zoo.config.schema", f"{name}Config") for name in _SECTIONS},
    "Engine": ("zoo.rl.engine", "Engine"),
    "Event": ("zoo.logging.callbacks.event", "Event"),
    "Recipe": ("zoo.config.schema", "Recipe"),
    "TrainResult": ("zoo.logging.result", "TrainResult"),
    "convert": ("zoo.tools.convert", "convert"),
    "evaluate": ("zoo.tools.evaluate", "evaluate"),
    "generate": ("zoo.tools.generate", "generate"),
    "load_recipe": ("zoo.config.compose", "load_recipe"),
    "plan": ("zoo.planner.plan", "plan"),
    "report": ("zoo.tools.runs.page", "report"),
    "score": ("zoo.tools.score", "score"),
    "speak": ("zoo.tools.speaking.speak", "speak"),
    "top_tokens": ("zoo.tools.top_tokens", "top_tokens"),
    "train": ("zoo.launch.launcher", "launch"),
    "verify": ("zoo.tools.verify", "verify"),
    "verify_served": ("zoo.tools.serving.comparison", "verify_served"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'zoo' has no attribute {name!r}")
    module, attribute = _WHERE[name]
    from zoo.packages import check_versions
    from zoo.parallel.process_state import preserve_process_state

    check_versions()
    with preserve_process_state():  # what libraries have to say on import is left out
        return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
