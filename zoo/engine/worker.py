"""One rank of a run: `python -m zoo.engine.worker <resolved config.yaml>`, started by :mod:`zoo.engine.launch`.

Exit codes: 0 done, 2 a user's mistake (one line on stderr), 130 interrupted (after saving), 1 with a traceback
for anything else.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from zoo.errors import UserError

_POLL_SECONDS = 2.0


def main(argv: list[str] | None = None) -> int:
    """Train as the rank that the environment names; returns the exit code."""
    (path,) = sys.argv[1:] if argv is None else argv
    end_with_parent()
    try:
        from zoo.config.compose import load_recipe
        from zoo.engine.loop import train

        return 130 if train(load_recipe(path)).interrupted else 0
    except UserError as error:
        print(f"zoo: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def end_with_parent() -> None:
    """End this process soon after the launcher is gone, even if that was killed.

    Ranks live in sessions of their own and would not be told.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
