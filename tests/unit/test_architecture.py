"""Holds the house together: who may import whom, and what every file of the tree must be or must not hold."""

import ast
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
FOLDERS = {"models": "zoo.models", "bridges": "zoo.bridges", "recipes": "zoo.recipes", "zoo": "zoo"}

# Room -> the rooms it may import besides itself (docs/architecture.md draws it). `errors`, `files`, `records`, `packages`
# and `config` are open to all but packing. Not named here: `cli` and `zoo/__init__.py`, which may use everything but a family.
INDEPENDENT = (
    "types", "errors", "pages", "user_code", "subprocesses", "packing", "registry", "recipes", "deferred_imports",
)  # fmt: skip
ROOMS = {
    **dict.fromkeys(INDEPENDENT, ""),
    "files": "types errors",
    "packages": "errors",
    "config": "registry",
    "nn": "packing config",
    "steps": "packing nn config",
    "data": "packing config registry subprocesses",
    "bridge": "config",
    "doctor": "packing nn config registry",
    "parallel": "nn data deferred_imports",
    "logging": "parallel data registry packages",
    "model": "parallel steps nn data bridge registry",
    "optim": "model parallel nn bridge registry",
    "checkpoint": "optim model parallel logging nn bridge registry pages",
    "planner": "model parallel packing nn data bridge registry subprocesses",
    "watchdog": "planner parallel logging subprocesses",
    "generation": "checkpoint model parallel logging packing nn data registry",
    "rollouts": "generation checkpoint optim model parallel logging packing steps nn data bridge registry subprocesses",
    "training": "rollouts generation checkpoint watchdog planner optim model parallel logging doctor steps nn data subprocesses",
    "launch": "training watchdog planner checkpoint parallel logging data registry subprocesses",
    "rl": "launch training rollouts planner generation checkpoint optim model parallel packing steps nn data bridge",
    "tools": "launch training watchdog planner generation checkpoint model parallel logging packing steps nn data bridge registry pages subprocesses",
    "bench": "tools launch training planner checkpoint model parallel logging packing nn data bridge subprocesses",
    "models": "packing steps nn data bridge config registry",
    "bridges": "bridge config models",  # of models: its own family
}
# Rooms within a room, in the same way; single files that lie beside them are named too.
INNER = {
    "config": {
        "layers": "",
        "recipes": "layers files hub locate entries schema",
        "foreign": "layers recipes files locate schema entries",
        "checks": "layers schema derived devices gpus locate architecture",
    },
    "bridge": {"mapping": "errors", "files": "errors parallel"},
    "bench": {"training": "options"},
    "parallel": {"megatron": ""},
    "logging": {"callbacks": "result run_log"},
    "tools": {"inspection": "", "runs": "", "serving": "asking"},
    "data": {"sources": "", "media": "sources", "processors": "sources media", "loading": "sources media processors"},
    "nn": {
        "kernels": "autograd",
        "adamw": "",
        "graphs": "autograd",
        "decoder": "kernels graphs autograd",
        "towers": "kernels graphs decoder autograd",
    },
}
OPEN_TO_ALL = {"types", "errors", "files", "records", "packages", "user_code", "config"}


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((REPO / folder).rglob("*.py"))]


def module_name(path: Path) -> str:
    folder, *rest = path.relative_to(REPO).with_suffix("").parts
    return ".".join([FOLDERS[folder], *rest]).removesuffix(".__init__")


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> Iterator[tuple[str, str, bool]]:
    """Module, name in it ("": the module itself) of all that `path` imports; whether only when called, or for types alone."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()

    def visit(node: ast.AST, lazy: bool) -> Iterator[tuple[str, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, "", lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                origin = ".".join([*base, *([child.module] if child.module else [])])
                yield from ((origin, alias.name, lazy) for alias in child.names)
            else:
                later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                typing = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
                yield from visit(child, lazy or later or typing)

    yield from visit(ast.parse(path.read_text()), False)


def families() -> set[str]:
    return {entry.name for entry in (REPO / "models").iterdir() if (entry / "__init__.py").exists()}


def offence(module: str, imported: str) -> str | None:
    """What is wrong with `module` importing `imported`, or None."""
    room, target = room_of(module), room_of(imported)
    if not imported.startswith("zoo.") or target == room == "":
        return None
    family = [*imported.split("."), ""][2] if target in ("models", "bridges") else ""
    own = [*module.split("."), ""][2] if room in ("models", "bridges") else ""
    if family in families() and family != own:
        return "another family" if own else "a family"
    if target == room and room in INNER:
        return inner_offence(room, module, imported)
    if target == room or room not in ROOMS:
        return None
    allowed = set(ROOMS[room].split())
    allowed |= set() if room in ("packing", "types", "errors", "files", "records") else OPEN_TO_ALL
    return None if target in allowed or not target else f"zoo.{target}"


def inner_offence(room: str, module: str, imported: str) -> str | None:
    """The same within a room; files that lie in none of its inner rooms use these, not the other way round."""
    inner = INNER[room]
    mine, theirs = ([*name.split("."), "", ""][2] for name in (module, imported))
    if mine == theirs or mine not in inner:
        return None
    if room == "data" and theirs in ("errors", "sample", "memory_limits", "template_limits", "digits", "tokenizer"):
        return None  # open to all
    return None if not theirs or theirs in inner[mine].split() else f"zoo.{room}.{theirs}"


def test_imports_point_one_way() -> None:
    bad = {
        f"{path.relative_to(REPO)} imports {imported}: zoo.{room_of(module_name(path))} must not use {wrong}"
        for path in sources()
        for origin, name, _ in imports(path)
        # A name of these is a room or family, elsewhere it may be anything.
        for imported in (origin, *([f"{origin}.{name}"] if name and origin in FOLDERS.values() else []))
        if (wrong := offence(module_name(path), imported))
    }
    assert not bad, "\n".join(sorted(bad))


@pytest.mark.parametrize(
    ("module", "imported", "wrong"),
    [
        ("zoo.packing.layout", "zoo.nn", "zoo.nn"),
        ("zoo.packing.layout", "zoo.packing.index", None),
        ("zoo.data.sources.rows", "zoo.data.loading.loader", "zoo.data.loading"),
        ("zoo.training.trainer", "zoo.models.qwen3_omni.step", "a family"),
        ("zoo.model.build", "zoo.training.trainer", "zoo.training"),
        ("zoo.training.trainer", "zoo.model.build", None),
        ("zoo.nn.multimodal", "zoo.nn.decoder.mtp", None),
        ("zoo.models.llava.step", "zoo.models.qwen3_omni", "another family"),
        ("zoo.models.qwen3_omni.step", "zoo.models.qwen3_omni.config", None),
        ("zoo.bridges.qwen3_omni", "zoo.models.qwen3_omni.config", None),
        ("zoo.cli.runs.train", "zoo.launch", None),
        ("zoo.cli.runs.train", "zoo.models.qwen3_omni", "a family"),
    ],
)
def test_the_rule_itself(module: str, imported: str, wrong: str | None) -> None:
    assert offence(module, imported) == wrong


def modules_of(path: Path, known: set[str]) -> set[str]:
    """The modules among `known` that `path` imports, anywhere in the file: when called, and for types alone, too."""
    pairs = [(origin, f"{origin}.{name}") for origin, name, _ in imports(path)]
    return {full if full in known else origin for origin, full in pairs} & known


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Groups of modules each of which reaches all the others: Warshall's transitive closure."""
    reach = {module: set(seen) for module, seen in graph.items()}
    for middle in graph:
        for seen in reach.values():
            if middle in seen:
                seen |= reach[middle]
    return {
        frozenset(other for other in graph if other in reach[module] and module in reach[other])
        for module in graph
        if module in reach[module]
    }


@pytest.mark.parametrize("room", sorted({room_of(module_name(path)) for path in sources()}))
def test_no_room_has_a_circle(room: str) -> None:
    """Imports within a room point one way, those within functions and for types alone included."""
    paths = {module_name(p): p for p in sources() if room_of(module_name(p)) == room}
    graph = {module: modules_of(path, set(paths)) - {module} for module, path in paths.items()}
    found = circles(graph)
    assert not found, sorted(map(sorted, found))


@pytest.mark.parametrize(
    ("graph", "wanted"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, ["abc"]),
        ({"a": {"b"}, "b": {"a"}, "c": {"a", "d"}, "d": {"c"}}, ["ab", "cd"]),
    ],
)
def test_circles_are_found(graph: dict[str, set[str]], wanted: list[str]) -> None:
    assert circles(graph) == set(map(frozenset, wanted))


def test_an_import_in_a_function_or_for_types_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.REPO", tmp_path)
    path = tmp_path / "zoo/room/a.py"
    path.parent.mkdir(parents=True)
    source = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ROOM.b import B\n"
        "def late():\n    from ROOM import c, d\n    from . import e\n"
    )
    path.write_text(source.replace("ROOM", "zoo.room"))
    known = {f"zoo.room.{name}" for name in "abcef"} | {"zoo.room"}
    assert modules_of(path, known) == {"zoo.room.b", "zoo.room.c", "zoo.room.e", "zoo.room"}


def test_packing_imports_torch_alone() -> None:
    for path in (REPO / "zoo/packing").rglob("*.py"):
        for imported, _, lazy in imports(path):
            top = imported.split(".")[0]
            allowed = top in {"zoo", "torch"} or top in sys.stdlib_module_names or (lazy and top == "megatron")
            assert allowed, f"{path.relative_to(REPO)} imports {imported}"


def test_framework_names_no_family() -> None:
    for path in (REPO / "zoo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in families(), f"{path.relative_to(REPO)}:{node.lineno} names a family"


# What a folder and a file of zoo/ may hold. Listed below: what is over that still; no entry may grow.
MOST_MODULES, MOST_LINES, MEDIAN_FUNCTION = 12, 400, 20
LONGER = {"zoo/steps/packed_step.py": 414}


def test_folders_and_files_keep_a_size_that_a_reader_can_take_in() -> None:
    modules = [path for path in (REPO / "zoo").rglob("*.py") if path.name != "__init__.py"]
    folders = Counter(str(path.parent.relative_to(REPO)) for path in modules)
    lines = {str(path.relative_to(REPO)): len(path.read_text().splitlines()) for path in modules}
    full = [f"{name}: {n} modules" for name, n in folders.items() if n > MOST_MODULES]
    long = [f"{name}: {n} lines" for name, n in lines.items() if n > LONGER.get(name, MOST_LINES)]
    assert not full + long, "\n".join(sorted(full + long))


def test_functions_are_short() -> None:
    lengths = [
        node.end_lineno - node.lineno + 1
        for path in (REPO / "zoo").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]
    assert statistics.median(lengths) <= MEDIAN_FUNCTION


def tree() -> list[Path]:
    """Every text file that is, or would be, part of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=REPO, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := REPO / name).is_file()]


def test_no_file_holds_a_machine_path_or_a_package_mirror() -> None:
    home = re.compile(rb"(?<![\w.~$}/-])/(?:home|Users|root)/\w")
    mirror = re.compile(rb"https?://(?!(?:test\.)?pypi\.org)[^\s/]*(?:pypi|artifactory|nexus|mirror|registry)", re.I)
    for path in tree():
        text = path.read_bytes()
        if b"\0" in text or path == Path(__file__):
            continue
        for pattern in (home, mirror):
            found = pattern.search(text)
            assert not found, f"{path.relative_to(REPO)} holds {found.group().decode()!r}"


def test_the_command_starts_without_torch() -> None:
    check = "import sys, zoo.cli.main; print(sorted({'torch', 'numpy', 'transformers', 'megatron'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_zoo_reads_its_own_json_in_one_way() -> None:
    """By `zoo.files` and `zoo.records`, which bound size and depth, refuse pipes and check types: no text of a file goes to `json`."""
    wrong = [
        f"{path.relative_to(REPO)}:{call.lineno}"
        for path in sources()
        if path.name not in ("files.py", "records.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("json.load", "json.loads")
        if ast.unparse(call.func) == "json.load"
        or re.search(r"\b(read_text|read_bytes|open|line)\b", ast.unparse(call.args[0]))
    ]
    assert not wrong, f"take read_record, read_object or line_of_json: {wrong}"
