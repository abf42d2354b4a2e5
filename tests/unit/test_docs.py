"""The documentation speaks of what is there: links, files, tests, keys, commands, rows and Python of its examples."""

import ast
import importlib
import itertools
import json
import re
import runpy
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.doc_blocks import PAGES, REPO, Block, blocks_of, commands_of, why_not_run

import zoo
from zoo.bench.options import read_options
from zoo.cli.arguments import split_flags, split_places, split_recipe, split_values
from zoo.cli.checkpoints.convert import KEYS as CONVERT_KEYS
from zoo.cli.checkpoints.eval import split as split_eval
from zoo.cli.checkpoints.generate import split as split_generate
from zoo.cli.checkpoints.speak import OWN as SPEAK_KEYS
from zoo.cli.main import SUBCOMMANDS
from zoo.cli.recipes.init import KEYS as INIT_KEYS
from zoo.cli.recipes.new_family import KEYS as FAMILY_KEYS
from zoo.cli.recipes.plan import KEYS as PLAN_KEYS
from zoo.cli.runs.bench import BENCHES, train_options
from zoo.cli.runs.inspect import KEYS as INSPECT_KEYS
from zoo.config.compose import load_recipe
from zoo.config.layers.keys import keys, sections
from zoo.config.schema import Recipe
from zoo.data.sources.references import Access
from zoo.data.sources.rows import make_row
from zoo.launch.templates import TEMPLATES
from zoo.registry import families
from zoo.tools.fit_table import find_kind, sizes_of

FLAGS = {
    "show": ("--schema", "--json"),
    "list": ("--json",),
    "bench": ("--json", "--profile"),
    "verify": ("--json",),
    "plan": ("--json", "--table"),
    "inspect": ("--json",),
    "train": tuple(TEMPLATES),
    "doctor": ("--json", "--known-wrong"),
    "new-family": ("--package", "--vision"),
}
OWN = {"plan": PLAN_KEYS, "inspect": INSPECT_KEYS, "doctor": ("kernels",)}  # keys of verbs, beside the recipe's
# Paths that start so are files here.
FOLDERS = ("benchmarks", "bridges", "docs", "examples", "models", "recipes", "scripts", "tests", "zoo")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPO)))


def blocks(page: Path, language: str) -> list[str]:
    """Texts of the fenced blocks of a language."""
    return [block.text for block in blocks_of(page, language)]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[list[str]]:
    """Every command of the page, in words: lines of bash blocks, and `zoo ...` or `make ...` in the prose."""
    inline = [Block("bash", code) for code in re.findall(r"`((?:zoo|make) \w[^`\n]*)`", prose(page))]
    for block in (*blocks_of(page, "bash"), *inline):
        yield from map(shlex.split, commands_of(block))


def test_the_table_of_parallel_layouts_is_that_of_the_tests() -> None:
    """Models, layouts and refusals of docs/parallelism.md; `--write-table` of the matrix writes them, with its figures."""
    from support.matrix import EXPERTS, PARALLEL, REFUSED, table, written_table

    written = written_table((REPO / "docs" / "parallelism.md").read_text())
    wanted = table(dict.fromkeys(set(itertools.product(PARALLEL, EXPERTS)) - set(REFUSED), 1e-9))
    figure = re.compile(r"\d\.\de-\d\d")
    assert figure.sub("", written) == figure.sub("", wanted)
    assert all(0 < float(error) < 1e-5 for error in figure.findall(written))


def test_there_are_pages() -> None:
    names = "README data packing parallelism recipes architecture packing-contract decisions megatron-faults"
    assert {f"{name}.md" for name in names.split()} <= {page.name for page in PAGES}


@pages
def test_tables_are_whole(page: Path) -> None:
    """A blank line within a table ends it: its further rows are shown as text."""
    for table in re.findall(r"(?:^ *\|.*\n)+", prose(page), re.MULTILINE):
        assert re.search(r"^.*\n *\|[-:| ]+\|\n", table), table.splitlines()[0][:200]


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" not in target and not target.startswith("#"):
            path = (page.parent / target.partition("#")[0]).resolve()
            assert path.exists(), f"{target}: no such file"
            assert path.is_relative_to(REPO), f"{target} leads out of the repository"


@pages
def test_files_and_tests_named_are_there(page: Path) -> None:
    sources = "\n".join(path.read_text() for path in (REPO / "tests").rglob("test_*.py"))
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./-]*", code):
            assert (REPO / code).exists(), f"{code}: no such file"
        if re.fullmatch(r"test_\w+", code):
            assert f"def {code}(" in sources, f"{code}: no such test"


@pages
def test_keys_named_are_those_of_the_schema(page: Path) -> None:
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        key = code.partition("=")[0]
        is_file = Path(key).suffix in (".py", ".md", ".jsonl")
        if re.fullmatch(rf"({'|'.join(sections(Recipe))})\.[\w.]+", key) and not is_file:
            free = key.startswith(("model.arch.", "train.lr_scale.", "data.template."))
            assert free or key in keys(Recipe), f"{code}: no such key"


@pages
def test_commands_are_understood(page: Path) -> None:
    for words in commands(page):
        program, *rest = words
        if program == "torchrun":
            program, rest = "zoo", rest[rest.index("zoo") + 1 :]
        if program == "docker" and rest[0] == "run":
            program, rest = "zoo", rest[rest.index("zoo") + 1 :]  # the image runs zoo
        if program == "zoo":
            check_zoo(rest)
        elif program == "pip":
            check_pip(rest)
        elif program == "make":
            makefile = (REPO / "Makefile").read_text()
            named = [(word.partition("=")[0], " ?[?]?=" if "=" in word else ":") for word in rest]
            assert all(re.search(rf"^{name}{end}", makefile, re.MULTILINE) for name, end in named), words
        elif program == "python" and rest[1:] and rest[1].startswith("benchmarks."):
            check_benchmark(*rest[1:])
        elif program == "python" and any(word.startswith(("tests/", "examples/")) for word in rest):
            paths = [word for word in rest if "/" in word]
            assert paths and all((REPO / path).exists() for path in paths), words
        else:
            assert why_not_run(" ".join(words)), f"{words}: not known to this test"


def check_benchmark(module: str, *words: str) -> None:
    """The script exists, and its options have these keys."""
    names = vars(importlib.import_module(module))
    options = next((kind for name, kind in names.items() if name.endswith("Options")), None)
    own = [word for word in words if not word.startswith("--") and "." not in word.partition("=")[0]]
    if options is not None:
        read_options(options, own)


def check_pip(words: list[str]) -> None:
    """It installs this checkout with extras that exist, or packages."""
    assert words[0] == "install", words
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"^\.\[([\w,]+)\]$", "\n".join(words), re.MULTILINE):
        assert set(named.split(",")) <= set(extras), words


def split_speak(rest: list[str]) -> None:
    places, _, overrides = split_places(rest, SPEAK_KEYS)
    assert len(places) == 2 and {text.partition("=")[0] for text in overrides} <= {*keys(Recipe)}, rest


SPLITS: dict[str, Callable[[list[str]], object]] = {
    "convert": lambda rest: split_values(rest, CONVERT_KEYS, "convert", ("SOURCE", "TARGET")),
    "init": lambda rest: split_values(rest, INIT_KEYS, "init", ()),
    "new-family": lambda rest: split_values(rest, FAMILY_KEYS, "new-family", ("NAME",)),
    "eval": split_eval,
    "generate": split_generate,
    "speak": split_speak,
}


def check_zoo(words: list[str]) -> None:
    """The verb exists, takes these flags, and the recipe resolves with these overrides."""
    verb, *rest = words
    if verb in ("--help", "--version"):
        return
    assert verb in SUBCOMMANDS, words
    if rest in ([], ["--help"]):
        return
    flags, rest = split_flags(rest, FLAGS.get(verb, ()))
    if verb in SPLITS:
        SPLITS[verb](rest)
        return
    if verb == "bench":
        assert rest[0] in BENCHES, words
        if rest[0] == "train":
            train_options(rest[1:])
        return
    if verb in ("verify", "score"):
        own = {"rows", "tolerance", "out", "top_k", "temperature"}
        if any(word.startswith("served=") for word in rest):
            own |= {"served", "limit", "max_rows", "served_model", "server_args", "server_log", "server_seconds"}
            assert sum("=" not in word for word in rest) in (1, 2), words
        else:
            assert sum("=" not in word for word in rest) == 2, words
        assert {word.partition("=")[0] for word in rest if "=" in word} <= {*own, *keys(Recipe)}, words
        return
    if verb == "completion":
        assert rest in (["bash"], ["zsh"]), words
        return
    if verb in ("list", "report") or not rest:
        return
    if "--table" in flags:
        given = dict(word.partition("=")[::2] for word in rest)
        find_kind(given.pop("hardware", "h100"))
        lines = sizes_of(given.pop("recipe", None), given.pop("size", None))
        load_recipe(lines[0][0], given)
        return
    name, overrides = split_recipe(rest, verb)
    overrides = [text for text in overrides if text.partition("=")[0] not in OWN.get(verb, ())]
    if not name.endswith(".yaml") and not name.startswith("runs/"):  # a file or run of the reader's own
        load_recipe(name, overrides)


@pages
def test_recipe_files_resolve(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "yaml"):
        file = tmp_path / "recipe.yaml"
        file.write_text(text)
        load_recipe(file)


@pages
def test_entry_points_are_those_that_are_read(page: Path) -> None:
    for text in blocks(page, "toml"):
        assert tomllib.loads(text)["project"]["entry-points"].keys() == {"zoo.families"}


@pages
def test_rows_are_rows(page: Path) -> None:
    for text in blocks(page, "json"):
        assert make_row(json.loads(text), page.name, Access(page.parent)).form in ("messages", "retrieval"), text


@pages
def test_python_uses_names_that_are_there(page: Path) -> None:
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            if node.value.id == "zoo":
                assert hasattr(zoo, node.attr), f"zoo.{node.attr}"
            if node.value.id in ("layout", "PackedLayout"):
                from zoo.packing import PackedLayout

                assert hasattr(PackedLayout, node.attr), f"PackedLayout.{node.attr}"


def test_the_readme_lists_the_families_as_they_are() -> None:
    """Modalities, smallest and largest size, and experts of its table; and the parallelism that it states for all."""
    text = (REPO / "README.md").read_text()
    row = r"^\| \[.*?\]\(models/(\w+)/README\.md\).*? \| (.*?) \| (.*?) \| (yes|no) \|$"
    table = re.findall(row, text, re.MULTILINE)
    assert {name for name, *_ in table} == {name for name in families() if (REPO / "models" / name).is_dir()}
    shown = "Tests show tp, sp, pp, vpp, cp and dp for all of them, ep and etp for those with experts"
    assert shown in " ".join(text.split())
    for name, modalities, sizes, experts in table:
        family = families()[name]
        assert tuple(modalities.split(", ")) == family.modalities
        published = {path.stem for path in REPO.glob(f"recipes/sizes/{name}/*.yaml")} - {"tiny"}
        published = sorted((size for size in published if not size.startswith("tiny-")), key=parameters)
        named = re.split(r" to |, ", sizes)
        assert {parameters(size) for size in named} == {parameters(published[0]), parameters(published[-1])}
        assert set(named) <= set(published)
        assert set(family.proved) == {"tp", "sp", "pp", "vpp", "cp", "dp", *(("ep", "etp") if experts == "yes" else ())}


def parameters(size: str) -> float:
    """Billions of parameters that a size's name says: 0.27 of 270m, 106 of 4.5-106b-a12b."""
    number, unit = re.findall(r"(?:^|-)([\d.]+)([bm])(?:-|$)", size)[0]
    return float(number) / (1000 if unit == "m" else 1)


def test_python_of_the_readme_resolves() -> None:
    calls = [
        node
        for text in blocks(REPO / "README.md", "python")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load_recipe"
    ]
    assert calls
    for call in calls:
        (name,) = call.args
        load_recipe(ast.literal_eval(name), **{k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg})


def test_family_tables_are_those_of_the_registry() -> None:
    script = runpy.run_path(str(REPO / "scripts" / "family_tables.py"))
    for family in families().values():
        readme = (REPO / "models" / family.name / "README.md").read_text(encoding="utf-8")
        assert script["with_table"](readme, family) == readme, "run python scripts/family_tables.py"
        assert "`lora`" in readme.partition("| recipes | ")[2].partition("\n")[0]
        assert "LoRA" not in readme, "its recipes are in the table"


MOST_WORDS, LONGEST_LINE, LONGEST_PARAGRAPH = 30_000, 120, 6  # words of all tracked Markdown together
OWN_LINE = re.compile(r"\s*([-*] |\d+\. |[|#><])")  # a list's item, a table's row, a heading


def test_pages_are_short() -> None:
    names = subprocess.run(["git", "ls-files", "*.md"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    pages = {*PAGES, *(REPO / name for name in names.splitlines())}
    long = []
    for page in pages:
        code, paragraph = False, 0
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            code ^= line.startswith("```")
            paragraph = 0 if code or not line.strip() or line.startswith("```") else paragraph + 1
            paragraph = 1 if paragraph and OWN_LINE.match(line) else paragraph
            if len(line) > LONGEST_LINE or paragraph > LONGEST_PARAGRAPH:
                long.append(f"{page.relative_to(REPO)}:{number}")
    assert not long, long
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= MOST_WORDS
