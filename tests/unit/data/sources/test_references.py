"""Downloads within limits of size and time."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from zoo.config.schema import DataConfig
from zoo.data.errors import RowError
from zoo.data.loading.sample_source import SampleSource
from zoo.data.processors.processor import Processor
from zoo.data.sources import references


class Answers(BaseHTTPRequestHandler):
    """/a.png is a file, /large never ends, /slow comes a byte at a time, and anything else is not there."""

    picture = b""

    def do_GET(self) -> None:
        known = self.path in ("/a.png", "/large", "/slow")
        self.send_response(200 if known else 404)
        self.end_headers()
        try:
            if self.path == "/a.png":
                self.wfile.write(self.picture)
            while self.path == "/large":
                self.wfile.write(bytes(2**16))
            while self.path == "/slow":
                self.wfile.write(b"x")
                time.sleep(0.05)
        except OSError:
            pass

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def site(media: Path) -> Iterator[str]:
    Answers.picture = (media / "a.png").read_bytes()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_picture_is_downloaded_where_it_is_allowed(site: str, processor: Processor, media: Path) -> None:
    messages = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "7"}]
    rows = [{"messages": messages, "image": f"{site}/a.png"}, {"messages": messages, "image": f"{site}/no.png"}]
    allowed = DataConfig(urls=True, on_error="skip")
    source = SampleSource.open([rows], processor, allowed, budget=512)
    sample = source.sample(0)
    assert sample is not None and sample.media["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert source.sample(1) is None and source.counts == {"url": 1}
    with pytest.raises(RowError, match=r"set data\.urls=true"):
        SampleSource.open([rows], processor, DataConfig(), budget=512).sample(0)


def test_limits_of_size_and_time(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "URL_MB", 1)
    with pytest.raises(RowError, match="/large is over 1 MiB") as caught:
        references.download(f"{site}/large")
    assert caught.value.cause == "url"
    monkeypatch.setattr(references, "URL_SECONDS", 0.4)
    began = time.monotonic()
    with pytest.raises(RowError, match=r"/slow takes longer than 0\.4 s"):
        references.download(f"{site}/slow")
    assert time.monotonic() - began < 3


def test_what_is_not_there_is_said(site: str) -> None:
    with pytest.raises(RowError, match="can't be downloaded: HTTP Error 404"):
        references.download(f"{site}/no.png")
    with pytest.raises(RowError, match=r"http://127\.0\.0\.1:9/x can't be downloaded: .*refused"):
        references.download("http://127.0.0.1:9/x")
