"""Kill conversions at random moments: `python kill_convert.py SOURCE TARGET KILLS`; prints what was left each time.

The meta model is built once, so that a conversion is little more than reading and writing; each is a fork
of this process.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from unittest.mock import patch

from zoo.bridge import SafetensorsFolder
from zoo.config.locate import look
from zoo.model import meta_model
from zoo.tools import convert


def whole(folder: Path, wanted: dict[str, int]) -> bool:
    """Whether the folder loads, with these tensors; False where there is nothing that does."""
    place = look(str(folder))
    if place is None:
        return False
    with SafetensorsFolder(place.weights) as reader:
        assert {name: reader.info(name).nbytes for name in reader.names()} == wanted
    assert (place.files / "config.json").is_file()
    return True


def main(source: str, target: Path, kills: int) -> dict[str, int]:
    arch = json.loads((Path(source) / "config.json").read_text())
    plan = meta_model.build_meta_model(arch)
    random.seed(0)
    with patch.object(convert, "build_meta_model", lambda *_: plan):
        for _ in range(2):  # the second one finds everything in memory, as those to come
            began = time.monotonic()
            convert.convert(source, target, quiet=True, overwrite=True)
            seconds = time.monotonic() - began
        with SafetensorsFolder(target / "weights") as reader:
            wanted = {name: reader.info(name).nbytes for name in reader.names()}
        kept = Path(shutil.move(target, target.parent.parent / "kept"))
        left: Counter[str] = Counter()
        for kill in range(kills):
            shutil.rmtree(target, ignore_errors=True)
            before = kill % 2 == 0
            if before:
                shutil.copytree(kept, target, copy_function=os.link)
            child = os.fork()
            if child == 0:
                convert.convert(source, target, quiet=True, overwrite=True)
                os._exit(0)
            time.sleep(random.uniform(0, 1.1 * seconds))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            ended = "ended before" if os.WIFEXITED(status) else "killed"
            loads = whole(target, wanted)
            moved = target.with_name(f".{target.name}.former").exists()
            assert loads or moved or not before, "the former one is lost"
            assert loads or ended == "killed"
            left[f"{ended}, {'whole' if loads else 'nothing'}"] += 1
        convert.convert(source, target, quiet=True, overwrite=True)
        assert whole(target, wanted)
        assert [path.name for path in target.parent.iterdir()] == [target.name], "something is left behind"
    return dict(left)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
