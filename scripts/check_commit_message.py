"""Checks a commit message, as pre-commit's hook `commit-msg`: python scripts/check_commit_message.py FILE

The subject is one imperative sentence under 72 characters, without a full stop, and a blank line stands before the body.
The mood is guessed from the first word's form: a noun that looks like a verb passes ("Loss"), and whether a commit
holds one change is for its author to see.
"""

import re
import sys
from pathlib import Path

LONGEST = 71
# Verbs that end like other forms, and words that no imperative begins with.
VERBS = {"Bias", "Bring", "Canvas", "Embed", "Focus", "Ping", "Shed", "String"}
OTHERS = {
    "A", "After", "All", "An", "Before", "Each", "Every", "For", "If", "In", "It", "No", "Of", "On", "One", "Only", "The",
    "They", "This", "What", "When", "With",
}  # fmt: skip
LEFT_TO_GIT = re.compile(r"(Merge|Revert|fixup!|squash!|amend!) ")


def faults(message: str) -> list[str]:
    """What is wrong with a message; lines that git adds as comments are left out."""
    text = message.partition("# ------------------------ >8 ------------------------")[0]
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    while lines and not lines[0].strip():
        del lines[0]
    subject = lines[0].rstrip() if lines else ""
    if LEFT_TO_GIT.match(subject):
        return []
    word = subject.partition(" ")[0]
    faults = []
    if not _is_imperative(word):
        faults.append(f"begin with a capitalised verb in the imperative (Add, Read, Refuse), not with {word!r}")
    if len(subject) > LONGEST:
        faults.append(f"keep the subject under {LONGEST + 1} characters: it has {len(subject)}")
    if subject.endswith("."):
        faults.append("end the subject without a full stop")
    if ";" in subject:
        faults.append("make two commits of two changes, rather than a subject with a semicolon")
    if len(lines) > 1 and lines[1].strip():
        faults.append("leave a blank line between subject and body")
    return faults


def _is_imperative(word: str) -> bool:
    if not re.fullmatch("[A-Z][a-z]+(-[a-z]+)?", word) or word in OTHERS:
        return False
    return word in VERBS or not re.search("((?<!e)ed|ing|(?<!s)s)$", word)


def main(path: str) -> None:
    if wrong := faults(Path(path).read_text(encoding="utf-8")):
        sys.exit("\n".join(["The commit message:", *(f"- {fault}" for fault in wrong)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
