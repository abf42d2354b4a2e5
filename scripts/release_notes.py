"""Prints what CHANGELOG.md says of the release that a tag names: python scripts/release_notes.py v0.1.0

Refuses a tag other than the version in zoo/__init__.py, so that no release carries another version's name.
"""

import re
import sys
from pathlib import Path

REPO = Path(__file__).parents[1]


def main(tag: str) -> None:
    (version,) = re.findall(r'^__version__ = "(.+)"$', (REPO / "zoo/__init__.py").read_text(), re.MULTILINE)
    if tag != f"v{version}":
        sys.exit(f"The tag {tag} is not v{version}, the version in zoo/__init__.py: change one of them.")
    sections = re.split(r"^## \[(.+?)\].*$", (REPO / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    if not texts.get(version, "").strip():
        sys.exit(f"CHANGELOG.md has no section [{version}]: write what users can do with it.")
    print(texts[version].strip())


if __name__ == "__main__":
    main(*sys.argv[1:])
