"""Words that are no names: each stands in no more definitions than `ALLOWED` says, and the numbers only go down.

Counted are names of modules, classes, functions, arguments, variables and attributes, without leading underscores; a longer
name that holds a word ("found_rows") is another name. Whoever renames lowers the number: run this file to print the table.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
FOLDERS = ("zoo", "models", "bridges")

TERMS = {  # words, and what to write instead
    "found one place here what those given": "the value's own name: segments, row, index, path",
    "beside anew takes": "next to, again, n, uses", "tells says asks goes": "returns, logs, reads, resumes",
    "room spare": "capacity, free memory", "sums": "checksums", "house rooms": "architecture, packages",
    "sound picture": "audio, image", "carry carried": "pass_through", "dialects": "name_prefixes",
    "Blocks Reach": "bidirectional spans, mask spec", "Ahead": "MTP inputs",
    "Taught Teaching Taken": "teacher logits, DistillationInputs", "Kept": "saved activations",
    "Order Channel": "SaveRequest, control group", "Watch Seen": "HeartbeatMonitor, PeerState",
    "Answering": "Generator", "claims": "batch validation", "label_shares": "CP label balancing",
    "whole_segments": "sample-level CP", "blank_answers": "answer token dropout",
    "untouched": "preserve_process_state", "undisguised": "re_raise_signal",
    "explained": "translate_oom_errors", "doing": "set_status", "tidy": "prune", "fixed": "static_shapes",
    "of": "from_rows, from_config",
}  # fmt: skip
INSTEAD = {word: term for words, term in TERMS.items() for word in words.split()}
ALLOWED = dict(place=1, beside=2, picture=1, blank_answers=1, of=1)  # public names; none of a word that is missing here


def defined(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name):
                yield name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name


@cache
def counted() -> Counter[str]:
    names: Counter[str] = Counter()
    for path in (path for folder in FOLDERS for path in (REPO / folder).rglob("*.py")):
        names[path.stem] += 1
        names.update(name.lstrip("_") for name in defined(path.read_text()))
    return names


@pytest.mark.parametrize("word", INSTEAD)
def test_a_word_names_no_more_than_it_did(word: str) -> None:
    assert counted()[word] <= ALLOWED.get(word, 0), f"{word}: write {INSTEAD[word]}"


def test_what_counts_as_a_definition() -> None:
    source = (
        "import a as b\ndef c(d, *, e=1):\n    f, g.h = i\n    for j in k: l(m)\nclass n:\n    o: int\n[q for p in r]"
    )
    assert sorted(defined(source)) == list("bcdefhjnop")


if __name__ == "__main__":
    left = counted()
    print(", ".join(f"{word}={left[word]}" for word in INSTEAD if left[word]))
