"""Files that make a folder one of sentence-transformers, from which vLLM's pooling takes its settings, too: written and read.

`modules.json` names what follows the model: pooling and normalisation. Keys of pooling are those that all versions read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from zoo.config.schema import EmbedConfig
from zoo.data.loading.pairs import PLAIN_QUERY
from zoo.errors import UserError
from zoo.files import read_json, read_object
from zoo.types import JsonObject

MODULES = "modules.json"
_PARTS = ("Transformer", "Pooling", "Normalize")
_MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
_POOLING = {"last": "lasttoken", "mean": "mean_tokens"}
_STATES = {"method": "forward", "method_output_name": "last_hidden_state"}


def write_embedding_files(folder: Path, embed: EmbedConfig, width: int, kinds: tuple[str, ...]) -> None:
    """Write them into an exported folder.

    Args:
        folder: the export's.
        embed: of a validated recipe.
        width: numbers of a vector.
        kinds: of media that the model takes, text among them.
    """
    paths = {name: f"{number}_{name}" if number else "" for number, name in enumerate(_PARTS)}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (name, path) in enumerate(paths.items())
    ]
    _write(folder / MODULES, modules)
    mode = _POOLING[embed.pooling]
    modes = {f"pooling_mode_{name}": name == mode for name in _MODES}
    _write(
        folder / paths["Pooling"] / "config.json", {"word_embedding_dimension": width, **modes, "include_prompt": True}
    )
    _write(folder / paths["Normalize"] / "config.json", {})
    chat, instruction = embed.template == "chat", embed.instruction or ""
    prompt = instruction if chat or not instruction else PLAIN_QUERY.format(instruction, "")
    prompts = {"query": prompt, "document": ""}
    _write(folder / "config_sentence_transformers.json", {
        "model_type": "SentenceTransformer", "prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine",
    })  # fmt: skip
    modalities: JsonObject = {"text": _STATES}
    if chat:
        modalities = {kind: _STATES for kind in kinds} | {
            "message": {**_STATES, "format": "structured" if kinds[1:] else "flat"}
        }
    called = {"chat_template": {"add_generation_prompt": True}} if chat else {}
    _write(folder / "sentence_bert_config.json", {
        "transformer_task": "feature-extraction", "modality_config": modalities, "module_output_name": "token_embeddings",
        "processing_kwargs": called,
    })  # fmt: skip


def stated_settings(folder: Path) -> JsonObject:
    """Keys of a recipe that the files of an embedding model state, whoever wrote them; {} where there are none.

    Raises:
        UserError: they can't be read, or pool in a way that zoo has not.
    """
    if not (folder / MODULES).is_file():
        return {}
    modules, prompts = read_json(folder / MODULES), folder / "config_sentence_transformers.json"
    listed = [module for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    path = next(
        (str(module.get("path")) for module in listed if str(module.get("type")).endswith("Pooling")), "1_Pooling"
    )
    stated = read_object(folder / path / "config.json")
    modes = [name for name in _MODES if stated.get(f"pooling_mode_{name}")] or [str(stated.get("pooling_mode"))]
    pooling = {
        zoo_name: name for zoo_name, name in _POOLING.items() if modes == [name] or [name.partition("_")[0]] == modes
    }
    if not pooling:
        raise UserError(
            f"{folder / path}: it pools by {' and '.join(modes)}; wanted one of {', '.join(_POOLING.values())}"
        )
    query = str((read_object(prompts).get("prompts") or {}).get("query") or "") if prompts.is_file() else ""
    plain = re.fullmatch(re.escape(PLAIN_QUERY.format("@", "")).replace("@", "(.*)") + " ?", query, re.DOTALL)
    instruction = {"embed.instruction": plain[1] if plain else query} if query else {}
    return {"train.loss": "embed", "embed.pooling": next(iter(pooling)), **instruction}


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
