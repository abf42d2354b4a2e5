"""`Client`: asks a running OpenAI-compatible server for the tokens of a conversation and their log-probabilities."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from zoo.errors import UserError, printable
from zoo.types import JsonMapping, JsonObject

KEY = "VLLM_API_KEY"  # environment: what the server was started with, where it wants a key
_SECONDS = 600.0  # longest wait for an answer
_MOST = 2**28  # bytes of an answer; a token of a prompt has about 150
_SHOWN = 500  # characters of a server's message


class RefusedError(Exception):
    """The server answers a request with a refusal; its words."""


@dataclass(frozen=True)
class Prompt:
    """A conversation as the server reads it: L token ids, and the log-probability of each given those before it (0.0 of the first)."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Client:
    """Requests to the server at `url` (without /v1) for the model that it calls `model`."""

    url: str
    model: str

    def chat_prompt(self, request: JsonMapping) -> Prompt:
        """The tokens that the server makes of a conversation with its answers.

        Raises:
            RefusedError: it does not take the conversation.
            UserError: it is out of reach, or gives no log-probabilities of prompts.
        """
        return self._prompt("/v1/chat/completions", {**request, "add_generation_prompt": False})

    def text_prompt(self, text: str) -> Prompt:
        """The tokens that it makes of a plain text; errors as for `chat_prompt`."""
        return self._prompt("/v1/completions", {"prompt": text})

    def _prompt(self, path: str, request: JsonMapping) -> Prompt:
        body = {"model": self.model, **request, "max_tokens": 1, "temperature": 0}
        answer = self.post(path, {**body, "prompt_logprobs": 0, "return_token_ids": True})
        choice = (answer.get("choices") or [{}])[0]  # which holds both in answers to plain texts
        ids, entries = (answer.get(key) or choice.get(key) for key in ("prompt_token_ids", "prompt_logprobs"))
        missing = [key for key, value in (("prompt_token_ids", ids), ("prompt_logprobs", entries)) if not value]
        if missing or len(ids) != len(entries):
            raise UserError(
                f"{self.url}: its answers have no {' and no '.join(missing) or 'log-probability of each token'} "
                "(return_token_ids, prompt_logprobs); wanted vLLM from 0.11, with the defaults of `vllm serve`"
            )
        pairs = zip(ids[1:], entries[1:], strict=True)
        return Prompt(ids, [0.0, *(entry[str(token)]["logprob"] for token, entry in pairs)])

    def answer(self, request: JsonMapping, most: int) -> str:
        """The greedy answer to a conversation, of so many tokens at most; errors as for `chat_prompt`."""
        body = {"model": self.model, **request, "max_tokens": most, "temperature": 0}
        choices = self.post("/v1/chat/completions", body).get("choices") or [{}]
        return str((choices[0].get("message") or {}).get("content") or "")

    def reward(self, request: JsonMapping) -> tuple[float, int]:
        """The number that a reward model gives a conversation, without an activation, and the tokens that it reads; errors as for `chat_prompt`."""
        answer = self.post("/classify", {"model": self.model, **request, "use_activation": False})
        values = (answer.get("data") or [{}])[0].get("probs") or []
        if len(values) != 1:
            raise UserError(
                f"{self.url}: it gives a conversation {len(values)} numbers; wanted a reward model's, which is one"
            )
        return float(values[0]), int(answer.get("usage", {}).get("prompt_tokens", 0))

    def post(self, path: str, body: JsonMapping) -> JsonObject:
        """The server's answer to a request; errors as for `chat_prompt`."""
        return _ask(f"{self.url}{path}", json.dumps(body).encode())

    @classmethod
    def connect(cls, url: str, model: str | None = None) -> Client:
        """A client of a running server, and of the only model that it has, or of one by name.

        Raises:
            UserError: nothing answers there, or it has several models, or none of that name.
        """
        url = url.rstrip("/").removesuffix("/v1")
        try:
            listed = _ask(f"{url}/v1/models").get("data") or []
        except RefusedError as error:
            raise UserError(f"{url}/v1/models: {error}; wanted an OpenAI-compatible server") from None
        names = [str(entry.get("id")) for entry in listed]
        if model is None and len(names) == 1:
            return cls(url, names[0])
        if model not in names:
            which = "several models; choose with served_model=:" if model is None else f"no model {model!r}; it has"
            raise UserError(f"{url}: it has {which} {', '.join(names) or 'none'}")
        return cls(url, model)

    def version(self) -> str:
        """The version that vLLM states; "" of a server that states none."""
        try:
            return str(_ask(f"{self.url}/version").get("version", ""))
        except (RefusedError, UserError):
            return ""


def is_ready(url: str) -> bool:
    """Whether a server that is being started answers requests."""
    try:
        with _opener.open(f"{url}/health", timeout=5):
            return True
    except (OSError, http.client.HTTPException):
        return False


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not know this machine's ports


def _ask(url: str, body: bytes | None = None) -> JsonObject:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    try:
        with _opener.open(urllib.request.Request(url, body, headers), timeout=_SECONDS) as response:
            content = response.read(_MOST)
        answer = json.loads(content)
    except urllib.error.HTTPError as error:
        raise RefusedError(f"{error.code}: {_message(error.read())}") from None
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise UserError(f"{url}: no answer ({why}); wanted the address of a running server") from None
    except ValueError:
        raise UserError(f"{url}: its answer is no JSON; wanted an OpenAI-compatible server") from None
    if not isinstance(answer, dict):
        raise UserError(f"{url}: its answer is no JSON object; wanted an OpenAI-compatible server")
    return answer


def _message(content: bytes) -> str:
    """What a refusal says, on one line."""
    text = content.decode(errors="replace")
    try:
        answer: Any = json.loads(text)
        answer = answer.get("error", answer) if isinstance(answer, dict) else answer
        text = str(answer.get("message", answer) if isinstance(answer, dict) else answer)
    except ValueError:
        pass
    return printable(" ".join(text.split()), _SHOWN)
