"""`zoo train hub.repo=`: what a run has exported is on the hub at its end, and a refused push loses nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import hub_server
from support.commands import Zoo, python, summary

pytestmark = pytest.mark.slow


def test_a_run_is_pushed_and_a_refused_push_loses_nothing(zoo: Zoo, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with hub_server.serve() as hub:
        env: dict[str, Any] = {
            "HF_ENDPOINT": hub.url, "HF_TOKEN": hub_server.TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*",
        }  # fmt: skip

        def train(*overrides: str) -> Any:
            return python(
                "-m", "zoo", *zoo.train_arguments(run, "train.steps=2", "log.predictions=0", *overrides), **env
            )

        typo = train("hub.repo=you/mine")
        assert typo.returncode == 2 and "hub.repo=you/mine: the token may not write there" in typo.stderr
        assert not (run / "checkpoints").exists() and not hub.repos
        hub.broken = True
        refused = train("hub.repo=me/mine", "max_shard_size=100KB")
        assert refused.returncode == 2, refused
        assert f"{run}/export is written, but the hub did not take it" in refused.stderr
        assert f"to try again: hf upload me/mine {run}/export --private" in refused.stderr
        assert "Traceback" not in refused.stderr and summary(run)["export"] == str(run / "export")
        assert len(list((run / "export").glob("model-*.safetensors"))) > 1
        hub.broken = False
        again = train("hub.repo=me/mine")
        assert again.returncode == 0 and f"pushed to {hub.url}/me/mine/commit/" in again.stdout, again
        files = {
            p.relative_to(run / "export").as_posix(): p.read_bytes() for p in (run / "export").rglob("*") if p.is_file()
        }
        assert hub.files("me/mine") == files and hub.repos["me/mine"]["private"]

        adapted = tmp_path / "adapted"
        keys = (
            "train.steps=2",
            "log.predictions=0",
            "lora.rank=2",
            "nproc=2",
            "hub.repo=me/adapter",
            "hub.private=false",
        )
        done = python("-m", "zoo", *zoo.train_arguments(adapted, *keys), **env)
        assert done.returncode == 0 and done.stdout.count("pushed to") == 1, done
        assert "belongs to" in done.stderr and not hub.repos["me/adapter"]["private"]
        assert json.loads(hub.files("me/adapter")["adapter_config.json"])["r"] == 2
