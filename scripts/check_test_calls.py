"""Whether tests call what is there: python scripts/check_test_calls.py, after scripts/typecheck.sh

mypy reads all tests, also those for a GPU and the slow ones that no run of `make test` starts, and this script keeps what it
finds of three kinds: calls with arguments that a function does not take, names and modules that are gone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = re.compile(r'^tests/.*\[(call-arg|name-defined|import-not-found)\]|^tests/.*Module "[^"]+" has no attribute')
STARRED = "Too many arguments"  # mypy's guess at f(*values, more)


def main() -> int:
    command = [sys.executable, "-m", "mypy", "--explicit-package-bases", "--namespace-packages", "--check-untyped-defs"]
    command += ["--ignore-missing-imports", "--implicit-reexport", "--no-error-summary", "tests"]
    env = {**os.environ, "MYPYPATH": ".typecheck:tests"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode not in (0, 1) or done.stderr:
        print(done.stdout[-2000:] + done.stderr)
        return 1
    wrong = [line for line in done.stdout.splitlines() if KEPT.search(line) and STARRED not in line]
    print("\n".join(wrong) or "Tests call what is there")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
