"""A small OpenAI-compatible server over transformers' own model and processor: what `zoo verify served=` is tested against."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

Answer = dict[str, Any]


class Refusal(Exception):
    """What a request is refused with."""


class TransformersModel:
    """Prompts of a Hugging Face folder, of texts and images, in fp32."""

    def __init__(self, folder: Path) -> None:
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = "ImageTextToText" if hasattr(config, "vision_config") else "CausalLM"
        if config.architectures[0].endswith("ForSequenceClassification"):
            kind = "SequenceClassification"
        self.model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = transformers.AutoProcessor.from_pretrained(folder)
        self.lock = threading.Lock()

    def __call__(self, path: str, body: Answer) -> Answer:
        with self.lock:
            inputs = self._text(body) if path == "/v1/completions" else self._chat(path, body)
            with torch.no_grad():
                logits = self.model(**inputs).logits[0]
        ids = inputs["input_ids"][0].tolist()
        if path == "/classify":
            assert body["use_activation"] is False
            return {"data": [{"probs": logits.tolist()}], "usage": {"prompt_tokens": len(ids)}}
        logprobs = logits[:-1].log_softmax(-1)
        entries = [{str(token): {"logprob": float(logprobs[n, token])}} for n, token in enumerate(ids[1:])]
        both = {"prompt_token_ids": ids, "prompt_logprobs": [None, *entries]}
        return {"choices": [both if path == "/v1/completions" else {}], **({} if path == "/v1/completions" else both)}

    def answer(self, path: str, body: Answer) -> Answer:
        """The greedy answer, special tokens but the last one included."""
        with self.lock, torch.no_grad():
            inputs = self._chat(path, body)
            ends = [self.tokenizer.eos_token_id, self.tokenizer.convert_tokens_to_ids("<|im_end|>")]
            options = {"max_new_tokens": body["max_tokens"], "do_sample": False, "eos_token_id": ends}
            tokens = self.model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :].tolist()
        return {"choices": [{"message": {"content": self.tokenizer.decode([t for t in tokens if t not in ends])}}]}

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    def _text(self, body: Answer) -> Any:
        return self.tokenizer(body["prompt"], return_tensors="pt")

    def _chat(self, path: str, body: Answer) -> Any:
        images = []
        for message in body["messages"]:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            for part in message["content"] if isinstance(message["content"], list) else ():
                if part["type"] == "image_url":
                    head, _, data = part.pop("image_url")["url"].partition(",")
                    assert head.startswith("data:image/") and head.endswith(";base64")
                    images.append(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))
                    part["type"] = "image"
        options = {
            "tools": body.get("tools"),
            "add_generation_prompt": body.get("add_generation_prompt", path == "/v1/chat/completions"),
        }
        text = self.processor.apply_chat_template(body["messages"], tokenize=False, **options)
        return self.processor(text=[text], return_tensors="pt", **({"images": images} if images else {}))


@contextmanager
def serving(answer: Callable[[str, Answer], Answer], models: tuple[str, ...] = ("served",)) -> Iterator[str]:
    """The address of a server that gives such answers to posted requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {"/v1/models": {"data": [{"id": name} for name in models]}, "/version": {"version": "1.2.3"}}
            self._send(200 if self.path in known else 404, known.get(self.path, {"error": {"message": "no such page"}}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["model"] in models
            try:
                self._send(200, answer(self.path, body))
            except Refusal as refusal:
                self._send(400, {"error": {"message": str(refusal)}})

        def _send(self, code: int, content: Answer) -> None:
            data = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
