"""A small Hugging Face hub on this machine, for a real client: repositories, tokens, and what is uploaded to them."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN, STRANGER = "hf_owner", "hf_stranger"


@dataclass
class Hub:
    """What the hub knows: `repos` by name, each with `private` and `files`; `broken`: uploads are refused from now on."""

    repos: dict[str, dict[str, Any]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    broken: bool = False
    url: str = ""

    def files(self, repo: str) -> dict[str, bytes]:
        """The files of a repository's newest commit."""
        files: dict[str, bytes] = self.repos[repo]["files"]
        return files


@contextmanager
def serve() -> Iterator[Hub]:
    """The hub while the block runs, at `hub.url`; its owner `me` has TOKEN."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: Hub

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def _answer(self, status: int, value: object = None, error: str = "") -> None:
        body = json.dumps(value if value is not None else {"error": error}).encode()
        self.send_response(status)
        for name, text in (
            ("X-Error-Message", error),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
        ):
            if text:
                self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _owner(self) -> str | None:
        """Who asks; None where the token is not known, which is answered."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        name = {TOKEN: "me", STRANGER: "stranger"}.get(token)
        if name is None:
            self._answer(401, error="Invalid credentials in Authorization header")
        return name

    def _serve(self) -> None:
        body, hub, path = self._body(), self.state, self.path.split("?")[0]
        hub.asked.append(f"{self.command} {path}")
        if path.startswith("/lfs-store/"):
            hub.blobs[path.rsplit("/", 1)[1]] = body
            self._answer(200, {})
            return
        if path == "/api/validate-yaml":  # of a model card
            self._answer(200, {"errors": [], "warnings": []})
            return
        owner = self._owner()
        if owner is None:
            return
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or owner}/{asked['name']}"
            if name.split("/")[0] != owner:
                self._answer(
                    403, error=f"You don't have the rights to create a model under the namespace {name.split('/')[0]}"
                )
            elif name in hub.repos:
                self._answer(409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"})
            else:
                private = asked.get("private", asked.get("visibility") == "private")
                hub.repos[name] = {"private": bool(private), "files": {}}
                self._answer(200, {"url": f"{hub.url}/{name}", "name": name})
            return
        repo = "/".join(parts[2:4]) if parts[:2] == ["api", "models"] else "/".join(parts[:2]).removesuffix(".git")
        if repo not in hub.repos:
            self._answer(404, error="Repository not found")
        elif "auth-check" in parts:
            self._answer(200, {}) if repo.split("/")[0] == owner else self._answer(403, error="Forbidden")
        elif hub.broken and self.command != "GET":
            self._answer(403, error="storage limit reached")
        elif "preupload" in parts:
            files = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["size"] > 2000 else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for f in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files, "commitOid": "0" * 40})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                {"oid": o["oid"], "size": o["size"], "actions": {"upload": {"href": f"{hub.url}/lfs-store/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif "commit" in parts:
            self._commit(repo, body)
        else:
            self._answer(
                200,
                {
                    "id": repo,
                    "modelId": repo,
                    "private": hub.repos[repo]["private"],
                    "tags": [],
                    "downloads": 0,
                    "sha": "0" * 40,
                    "siblings": [],
                },
            )

    def _commit(self, repo: str, body: bytes) -> None:
        hub = self.state
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                hub.files(repo)[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                blob = hub.blobs[value["oid"]]
                assert hashlib.sha256(blob).hexdigest() == value["oid"] and len(blob) == value["size"]
                hub.files(repo)[value["path"]] = blob
        oid = hashlib.sha1(body).hexdigest()
        self._answer(200, {"success": True, "commitUrl": f"{hub.url}/{repo}/commit/{oid}", "commitOid": oid})

    do_GET = do_POST = do_PUT = do_HEAD = _serve
