"""Files of rows and media for tests of their readers."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

from PIL import Image


def dialogue(question: Any, answer: Any = "a", **more: Any) -> dict[str, Any]:
    """A row of one question and its answer, and its other keys."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def png(shade: int = 0, size: tuple[int, int] = (32, 32)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (shade, shade, shade)).save(file, "png")
    return file.getvalue()


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def write_tar(path: Path, members: dict[str, Any]) -> str:
    """A tar of members by name: bytes, or values that are written as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, value in members.items():
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return str(path)
