"""Weights of a hub id: their own config.json or the size published under the id decides, and never the tiny size."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from zoo.config import compose, hub
from zoo.config.compose import load_recipe, resolve, save_recipe
from zoo.config.files import read_size
from zoo.config.recipes.published import published_size
from zoo.config.schema import Recipe
from zoo.errors import ConfigError
from zoo.planner.plan import as_planned
from zoo.tools.new_recipe import draft, look_at_data, look_at_model

PUBLISHED = "Qwen/Qwen3-VL-2B-Instruct"
TRAINING = ("epochs", "steps", "lr", "min_lr", "warmup_steps", "global_batch", "weight_decay", "optimizer")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compose, "gpu_count", lambda: 0)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A hub here, with the config.json of each id in the dict."""
    configs: dict[str, Any] = {}

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            body = json.dumps(configs.get(self.path.partition("/resolve/")[0].strip("/"))).encode()
            self.send_response(404 if body == b"null" else 200)
            version = hashlib.sha1(body).hexdigest()
            self.send_header("ETag", f'"{version}"')
            self.send_header("X-Repo-Commit", version)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_GET = do_HEAD

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "getproxies", dict)
        yield configs
        server.shutdown()


def cached(folder: Path, hub_id: str, config: dict[str, Any]) -> None:
    """A config.json as an earlier download has left it."""
    repository = folder / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("2" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("2" * 40)
    (snapshot / "config.json").write_text(json.dumps(config))


def training(recipe: Recipe) -> dict[str, Any]:
    values = {name: getattr(recipe.train, name) for name in TRAINING}
    return {**values, "budget": recipe.packing.budget, "nproc_cpu": recipe.nproc_cpu, "bundled": recipe.data.bundled}


def of_a_folder(name: str, folder: Path, *overrides: str) -> Recipe:
    """The recipe for weights in a folder, which holds a config.json alone."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "num_hidden_layers": 3}))
    return load_recipe(name, [f"model.init={folder}", *overrides])


@pytest.mark.parametrize("name", ["qwen3_vl_sft", "qwen3_vl_lora", "qwen3_vl_dpo", "demo"])
@pytest.mark.parametrize("overrides", [[], ["hardware=1xh100"]])
def test_an_id_trains_as_a_folder_does(name: str, overrides: list[str], tmp_path: Path) -> None:
    wanted = of_a_folder(name, tmp_path / "folder", *overrides)
    for hub_id in (PUBLISHED, "org/unknown"):
        recipe = load_recipe(name, [f"model.init={hub_id}", *overrides])
        if name == "demo":  # which names its size itself
            assert recipe.size == "tiny"
            continue
        assert training(recipe) == training(wanted)
        assert (recipe.size, recipe.engine.precision) == (None, wanted.engine.precision)


def test_a_gpu_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "gpu_count", lambda: 8)
    recipe = load_recipe("qwen3_vl_sft", [f"model.init={PUBLISHED}", "hardware=cpu"])
    assert recipe.size is None and recipe.model.arch == read_size("qwen3_vl", "2b").tree["model"]["arch"]


def test_the_config_on_the_hub_decides(asked: dict[str, Any], tmp_path: Path) -> None:
    config = {"model_type": "qwen3_vl", "text_config": {"num_hidden_layers": 5}}
    asked["org/name"] = asked[PUBLISHED] = config
    for hub_id in ("org/name", PUBLISHED):
        resolved = resolve("qwen3_vl_sft", [f"model.init={hub_id}", "model.arch.text_config.vocab_size=9"])
        assert resolved.recipe.model.arch == {
            "model_type": "qwen3_vl", "text_config": {"num_hidden_layers": 5, "vocab_size": 9},
        }  # fmt: skip
        assert resolved.size_why == "architecture of model.init: its config.json on the hub"
    missing = resolve("qwen3_vl_sft", ["model.init=org/gone"])
    assert missing.recipe.model.arch == {} and "is not to be had (" in missing.size_why
    asked["org/broken"] = [1]
    with pytest.raises(ConfigError, match=r"^model\.init=org/broken: "):
        load_recipe("qwen3_vl_sft", ["model.init=org/broken"])


def test_a_cached_config_serves_offline(tmp_path: Path) -> None:
    cached(tmp_path / "cache", "org/name", {"model_type": "qwen3_vl", "num_hidden_layers": 4})
    recipe = load_recipe("qwen3_vl_sft", ["model.init=org/name"])
    assert recipe.model.arch["num_hidden_layers"] == 4 and recipe.size is None


def test_a_published_id_is_known_without_a_hub(tmp_path: Path) -> None:
    resolved = resolve("qwen3_vl_moe_lora", ["model.init=Qwen/Qwen3-VL-30B-A3B-Instruct"])
    assert "the published size=30b-a3b, as its config.json is not to be had (HF_HUB_OFFLINE" in resolved.size_why
    assert resolved.recipe.model.arch == read_size("qwen3_vl", "30b-a3b").tree["model"]["arch"]
    planned = as_planned(resolved.recipe)
    assert planned is not None and planned.model.arch == resolved.recipe.model.arch
    assert published_size("Qwen/Qwen3.6-27B") == ("qwen35_vl", "27b")
    assert published_size("Qwen/Qwen3") is None
    assert load_recipe("qwen3_vl_sft", [f"model.init={PUBLISHED}", "size=tiny"]).size == "tiny"
    save_recipe(resolved.recipe, tmp_path / "config.yaml")
    assert load_recipe(tmp_path / "config.yaml") == resolved.recipe


def test_a_saved_recipe_does_not_ask_the_hub_again(asked: dict[str, Any], tmp_path: Path) -> None:
    asked["org/name"] = {"model_type": "qwen3_vl", "num_hidden_layers": 5}
    save_recipe(load_recipe("qwen3_vl_sft", ["model.init=org/name"]), tmp_path / "config.yaml")
    asked["org/name"] = {"model_type": "qwen3_vl", "num_hidden_layers": 6}
    assert load_recipe(tmp_path / "config.yaml").model.arch["num_hidden_layers"] == 5


def test_what_init_writes_says_what_it_trains_with(tmp_path: Path) -> None:
    data = look_at_data("digits")
    text = draft(data, look_at_model(PUBLISHED, data), False, Path("my.yaml"))
    assert "# train: {epochs: 1, lr: 1e-05, global_batch: 8}" in text
    (tmp_path / "my.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "my.yaml")
    assert (recipe.size, recipe.train.epochs, recipe.train.lr) == (None, 1.0, 1e-5)
