"""Pages and model cards show strangers' texts as texts: no field of a row, a recipe, a log or a name becomes markup."""

import json
import shutil
import subprocess
from dataclasses import replace as with_parts
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from huggingface_hub import ModelCard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

import zoo
from zoo.bridge.files.side_files import write_card
from zoo.checkpoint import model_card
from zoo.config.compose import load_recipe, save_recipe
from zoo.config.locate import Place, look
from zoo.config.schema import Recipe
from zoo.errors import printable
from zoo.pages import escape_markdown, render
from zoo.tools.inspection.drawing import write_page
from zoo.tools.inspection.lengths import Filling, Lengths
from zoo.tools.inspection.rows import KINDS, PackedRow, Segment, Span

HOSTILE = "\"'><img src=x onerror=\"document.title='taken'\"></title></style></pre><script>document.title='taken'</script>{{ 7*7 }}"
MARKDOWN = "<script>alert(1)</script> &lt;b&gt; | **x** __y__ ~~z~~ `c` ``` [a](javascript:alert(2)) ![i](x.png) [r][1] <https://evil.test> https://evil.test \\ \\| $$x$$ {{ 7*7 }} #\n---\n# title\n\n[1]: x\x1b[2J"
# Every tag and attribute that the pages themselves have.
TAGS = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "span", "div", "i", "svg", "polyline", "line",
    "text", "circle", "details", "summary", "pre", "mark", "table", "tr", "th", "td", "a", "figure", "figcaption", "img", "script",
}  # fmt: skip


class Page(HTMLParser):
    """Reads a page as a browser does, and keeps what could run something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.targets: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.targets += [value or "" for name, value in attrs if name in ("src", "href")]
        self.texts += [value or "" for name, value in attrs if name in ("title", "aria-label", "data-chart")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def check(path: Path, scripts: int) -> Page:
    """The page has its own tags alone, no handlers, `scripts` scripts; in a browser, where there is one, nothing runs."""
    page = Page(path.read_text(encoding="utf-8"))
    assert set(page.tags) <= TAGS and not page.handlers
    assert page.tags.count("script") == scripts
    assert not [target for target in page.targets if not target.startswith(("data:image/png", "%22"))]
    assert any("<script>document.title='taken'</script>" in text for text in page.texts)
    assert not any("49" in text and "{{" not in text for text in page.texts if "onerror" in text)
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000"]
        dom = subprocess.run(
            [*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        assert "<title>taken</title>" not in dom and "<title>" in dom
    return page


def test_texts_of_rows_stay_texts(tmp_path: Path) -> None:
    """Whatever a row brings: its kind, its source, the texts of its tokens; also the run's title and the picture's name."""
    spans = tuple(Span(kind, 2 * i, 2 * i + 2, HOSTILE if i % 2 else "") for i, kind in enumerate(KINDS))
    end = 2 * len(KINDS)
    segment = Segment(0, end, end + 1, HOSTILE, HOSTILE, spans)
    row = PackedRow(end + 2, (segment, segment), torch.zeros(3, end + 2), HOSTILE)
    filling = Filling(8, 0, 1, 1.0, 0.0, 0.0, 0.0)
    lengths = Lengths(1, HOSTILE, {HOSTILE: 1.0}, 0.5, {HOSTILE: 0.5}, {HOSTILE: 1}, (filling,), (3,))
    page = check(write_page([row], lengths, HOSTILE, HOSTILE, tmp_path / "rows.html"), scripts=0)
    assert sum("taken" in text for text in page.texts) >= 10


def hostile_log() -> list[dict[str, Any]]:
    scores = {"exact_match": 0.5, "rows": HOSTILE, "loss": 2.0}
    return [
        {"event": "start", "step": 0, "total_steps": HOSTILE, "time": 1e9, HOSTILE: HOSTILE},
        *({"step": n, "loss": 1.0, HOSTILE: 2.0, "real_tokens": 5, "labels": 1} for n in range(1, 4)),
        {"event": "skip", "step": 2, "cause": HOSTILE, "why": HOSTILE, "time": HOSTILE},
        {"event": "export", "step": 3, "time": 1e9, "folder": [HOSTILE], HOSTILE: {HOSTILE: HOSTILE}},
        {"event": "eval", "step": 3, "loss": 1.0, "exact_match": 0.5, "by_kind": {HOSTILE: scores}, "data": [HOSTILE]},
    ]


@pytest.mark.parametrize("count", [1, 2])
def test_texts_of_runs_stay_texts(count: int, tmp_path: Path) -> None:
    """Whatever a run's folder brings: its name, its log, its recipe, what is said of its machine."""
    folders = []
    for number in range(count):
        folder = tmp_path / f"{number}" / HOSTILE.replace("/", "∕")
        (folder / "plots").mkdir(parents=True)
        (folder / "plots" / "predictions.png").write_bytes(b"\x89PNG\r\n\x1a\n")
        (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in hostile_log()))
        recipe = load_recipe("qwen3_vl_sft", ["hardware=cpu", "train.keep_best=null"])
        recipe = with_parts(
            recipe,
            recipe=HOSTILE,
            data=with_parts(recipe.data, train=[HOSTILE, str(number)]),
            run=with_parts(recipe.run, callbacks=[HOSTILE]),
        )
        save_recipe(recipe, folder / "config.yaml")
        (folder / "env.json").write_text(
            json.dumps({"system": HOSTILE, "python": HOSTILE, "gpus": [HOSTILE], "packages": {HOSTILE: HOSTILE}})
        )
        folders.append(folder)
    page = check(zoo.report(folders, tmp_path / "report.html"), scripts=1)
    assert sum("taken" in text for text in page.texts) >= 12 * count


def test_templates_escape_and_name_what_they_lack() -> None:
    with pytest.raises(Exception, match="undefined"):
        render("zoo.tools.runs", "table.html.jinja")
    assert "<b>" not in render("zoo.tools.runs", "table.html.jinja", head=["<b>"], rows=[["<b>"]], text=1)


class Cells(HTMLParser):
    """Reads what a renderer makes of Markdown: its tags, and the texts of a table's cells."""

    def __init__(self, markdown: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.cells: list[str] = []
        self.text = ""
        renderer = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
        self.feed(renderer.render(markdown))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.text = ""

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "h1"):
            self.cells.append(self.text)


CARD_TAGS = {"h1", "h2", "p", "table", "thead", "tbody", "tr", "th", "td", "pre", "code"}


def hostile_recipe(text: str) -> Recipe:
    """A recipe whose texts are all that one, choices too."""
    recipe, choice = load_recipe("qwen3_vl_lora", ["hardware=cpu"]), cast(Any, text[:40])
    return with_parts(
        recipe,
        recipe=text.replace("/", "∕"),
        size=text,
        data=with_parts(recipe.data, train=[text.replace("/", "∕")]),
        lora=with_parts(recipe.lora, targets=[text[:40]]),
        packing=with_parts(recipe.packing, mode=choice),
        engine=with_parts(recipe.engine, precision=choice),
        model=with_parts(recipe.model, freeze=[text]),
        train=with_parts(recipe.train, schedule=choice),
    )


def base(folder: Path, name: str) -> Place:
    """A model of that folder's name, whose own card is a stranger's, too."""
    place = folder / name
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    lines = ["license: 'yes'", "license_name: <b>", "license_link: javascript:x", f"base_model: {MARKDOWN}"]
    (place / "README.md").write_text("\n".join(["---", *lines, "---", ""]))
    found = look(str(place))
    assert found is not None
    return found


@pytest.mark.parametrize("adapter", [True, False])
def test_texts_of_model_cards_stay_texts(adapter: bool, tmp_path: Path) -> None:
    """Each name and value that a recipe, a base model or a tokenizer brings is one cell, with the letters that it has."""
    name = MARKDOWN.replace("/", "∕")[:200]
    arch = {"architectures": [MARKDOWN], "model_type": MARKDOWN}
    source = base(tmp_path, name)
    card = model_card.trained(hostile_recipe(MARKDOWN), 7, source, arch, adapter=adapter, ends={MARKDOWN[:250]: 5})
    write_card(tmp_path, tmp_path, card)
    loaded = ModelCard.load(tmp_path / "README.md")
    library = "peft" if adapter else "transformers"
    assert loaded.data.to_dict() == {"library_name": library, "license": "yes", "tags": ["zoo"]}
    page = Cells(loaded.text)
    assert set(page.tags) <= CARD_TAGS
    assert [pair for pair in page.attributes if pair != ("class", "language-python")] == []
    title, *cells = page.cells
    assert title == f"Model {'adapters for' if adapter else 'from'} {printable(name).strip()}"
    table = dict(zip(cells[::2], cells[1::2], strict=True))
    expected = {
        "base model": name,
        "architecture": "not known",
        "precision": MARKDOWN[:40],
        "not trained": MARKDOWN,
        "data": MARKDOWN.replace("/", "∕"),
        "answers end at": f"{MARKDOWN[:250]} (5)",
        "licence": "yes",
    }
    assert {key: table[key] for key in expected} == {
        key: printable(text, 300).strip() for key, text in expected.items()
    }
    assert "".join(table).isascii() and "alert(1)" in table["recipe"]


def test_texts_of_conversions_stay_texts(tmp_path: Path) -> None:
    source = base(tmp_path, "x")
    for native in (True, False):
        card = model_card.converted(source, {}, {MARKDOWN: MARKDOWN}, native=native)
        page = Cells(card.split("---\n", 2)[2])
        assert set(page.tags) <= CARD_TAGS and page.cells.count(printable(MARKDOWN)) >= 1


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from("\\`*_{}[]()<>#+-.!|~&;$@:/=\"' \n\taw1é"), max_size=12) | st.text(max_size=12))
@example("\\|")
@example("&lt;")
@example("1. x")
@example("    x")
@example("===")
@example("---")
def test_a_value_is_one_text_wherever_it_stands(text: str) -> None:
    """At the beginning of a line, in a heading, in a table's cell: a renderer shows the text that was given."""
    wanted = printable(text).strip()
    value = escape_markdown(text)
    page = Cells(f"{value}\n\n# {value}\n\n| a |\n|---|\n| {value} |\n")
    blocks = ["p"] * bool(wanted) + ["h1", "table", "thead", "tr", "th", "tbody", "tr", "td"]
    assert page.tags == blocks and page.cells == [wanted, wanted]
