"""Each page of the documentation is run: its commands and Python in order, in one folder, small, on a CPU, with stand-ins.

`support/doc_blocks.py` has the stand-ins, and lists what is not run, with the reason.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support.commands import Zoo, bundled, python, text_row, write_rows
from support.doc_blocks import (
    BEFORE,
    LANGUAGES,
    NOT_RUN,
    OTHER_NUMBERS,
    PAGES,
    PAGES_NOT_RUN,
    REPO,
    Block,
    blocks_of,
    commands_of,
    small,
    why_not_run,
    with_stand_ins,
)
from support.tiny_qwen3_vl import write_tiny_qwen3_vl

NAMED = {str(page.relative_to(REPO)): page for page in PAGES}
RUN = [name for name, page in NAMED.items() if name not in PAGES_NOT_RUN and blocks_of(page)]


def test_every_block_is_run_or_listed() -> None:
    """No block is in a language that is left out, no command neither zoo's nor listed, and nothing is listed that no page has."""
    used = set()
    for name in RUN:
        for block in blocks_of(NAMED[name]):
            assert block.language in LANGUAGES, f"{name}: a block of {block.language or 'no language'}"
            for text in commands_of(block) if block.language == "bash" else [block.text]:
                used.add(why_not_run(text))
                if block.language == "bash" and why_not_run(text) is None:
                    assert text.startswith(("zoo ", "torchrun ")), f"{name}: {text} is neither run nor listed"
    assert set(NOT_RUN) - used == set() and set(PAGES_NOT_RUN) <= set(NAMED)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_what_a_page_says_runs(name: str, folder: Path, zoo: Zoo) -> None:
    page = Page(name, folder, Zoo(zoo.server, folder, folder))
    for block in blocks_of(NAMED[name]):
        if block.language == "bash":
            for command in commands_of(block):
                page.run(command)
        elif why_not_run(block.text) is None:
            page.take(block)


@pytest.fixture(scope="session")
def stand_ins(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the pages take to be there: rows, a hub's weights, and runs."""
    folder = tmp_path_factory.mktemp("pages")
    write_tiny_qwen3_vl(folder / "hub" / "tiny")
    image = bundled("image")
    for name in ("strip.webp", "photo.png", "photo.jpg"):
        shutil.copy(image["images"][0], folder / name)
    rows = [text_row(100 + 7 * number) for number in range(8)] + [{**image, "images": ["strip.webp"]}]
    for name in ("my", "my_train", "my_heldout", "a", "b"):
        write_rows(folder / f"{name}.jsonl", rows)
    write_rows(folder / "pairs.jsonl", [{**row, "rejected_response": "7"} for row in rows])
    (folder / "my_recipe.yaml").write_text("base: qwen3_vl_sft\n")
    program = Zoo(zoo.server, folder, folder)
    for arguments in ("recipe=demo train.eval_rows=4", "recipe=qwen3_vl_sft run.dir=runs/sft data.eval=none"):
        done = program("train", *arguments.split(), "nproc=1", "train.steps=2")
        assert done.code == 0, done
    for copy in ("a", "b"):
        shutil.copytree(folder / "runs" / "demo", folder / "runs" / copy)
    return folder


@pytest.fixture
def folder(stand_ins: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the stand-ins, so that no page sees what another has made."""
    folder = Path(shutil.copytree(stand_ins, tmp_path / "page"))
    if request.node.name.endswith("[README.md]"):  # which trains the demo
        shutil.rmtree(folder / "runs" / "demo")
    (folder / "digits").symlink_to(REPO / "zoo" / "data" / "digits")
    return folder


class Page:
    """A page that is run: its folder, and what its blocks have printed and named so far."""

    def __init__(self, name: str, folder: Path, zoo: Zoo) -> None:
        self.name, self.folder, self.zoo = name, folder, zoo
        self.printed, self.python = "", BEFORE.get(name, "")

    def run(self, command: str, code: int = 0) -> None:
        if why_not_run(command):
            return
        arguments = small(command)
        if arguments[0] == "train" and code == 0 and "run.dir=" not in command and "recipe=demo" not in command:
            arguments.append(f"run.dir=runs/command{self.zoo.count}")  # two lines of a page are two runs
        done = self.zoo(*arguments)
        self.printed += done.out + done.err
        assert done.code == code, f"{command}\nas {arguments}\n{done.out[-2000:]}\n{done.err[-3000:]}"

    def take(self, block: Block) -> None:
        """Run Python, write a file that begins with its name, compare an output."""
        text = block.text
        if block.language == "python":
            self.run_python(text)
        elif title := re.match(r"# (\S+\.yaml)\n", text):
            (self.folder / title[1]).write_text(text)
        elif block.language == "text":
            if text.startswith("$ "):
                command, text = text.removeprefix("$ ").split("\n", 1)
                self.run(command, code=2)
            self.has_printed(text)

    def run_python(self, text: str) -> None:
        """As a script, behind the page's earlier blocks; what stands behind a print as its output is printed."""
        self.python += with_stand_ins(text)
        (self.folder / "page.py").write_text(self.python)
        done = python("page.py", cwd=self.folder, timeout=3000)
        self.printed += done.stdout
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        for output in re.findall(r"^ *print\(.*\)  # (.+)$", text, re.MULTILINE):
            self.has_printed(output)

    def has_printed(self, text: str) -> None:
        """Each line of the text is among what was printed."""

        def plain(text: str) -> str:
            text = re.sub(r"\d[\d.]*", "0", text) if self.name in OTHER_NUMBERS else text
            return " ".join(text.split())

        printed = plain(self.printed)
        for line in text.splitlines():
            assert plain(line) in printed, f"{self.name}: {line}\nis not in\n{self.printed[-5000:]}"
