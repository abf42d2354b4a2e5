"""Prints numbers of the source tree, to compare two commits: `python scripts/house.py [FOLDER]`.

Lines of files and functions, files of folders, arrows (imports) and circles between modules, rooms and inner rooms, and words of
the README. Imports for types alone and those within functions count too.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

FOLDERS = {"zoo": "zoo", "models": "zoo.models", "bridges": "zoo.bridges"}


def modules(repo: Path) -> dict[str, Path]:
    """Name of every module, and its file."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((repo / folder).rglob("*.py")):
            inside = path.relative_to(repo / folder).with_suffix("").parts
            found[".".join([package, *inside]).removesuffix(".__init__")] = path
    return found


def imported(name: str, path: Path, known: Iterable[str]) -> Iterator[str]:
    """The modules among `known` that a module imports."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield from [full for full in (f"{origin}.{alias.name}", origin) if full in known][:1]


def arrows(pairs: Iterable[tuple[str, str]], depth: int | None) -> set[tuple[str, str]]:
    """Pairs of modules as pairs of their first `depth` names (None: all), without those within one."""
    short = {tuple(".".join(name.split(".")[:depth]) for name in pair) for pair in pairs}
    return {(a, b) for a, b in short if a != b}


def circles(edges: set[tuple[str, str]]) -> list[set[str]]:
    """Sets of two or more names that reach one another along the arrows."""
    names = {name for edge in edges for name in edge}
    reach = {name: {b for a, b in edges if a == name} for name in names}
    for middle in names:
        for name in names:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    rings = {frozenset(b for b in reach[a] if a in reach[b]) for a in names}
    return sorted((set(ring) for ring in rings if len(ring) > 1), key=sorted)


def report(repo: Path) -> Iterator[str]:
    files = modules(repo)
    lines = {name: len(path.read_text().splitlines()) for name, path in files.items()}
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in files.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    folders = Counter(path.parent for path in files.values() if path.name != "__init__.py")
    largest, count = folders.most_common(1)[0]
    yield f"files                    {len(files)}, {sum(lines.values())} lines"
    yield f"lines a file             median {median(lines.values()):g}, most {max(lines.values())}, over 400: {sum(n > 400 for n in lines.values())}"
    yield f"lines a function         median {median(functions):g}, most {max(functions)}, over 50: {sum(n > 50 for n in functions)}"
    yield f"files a folder           median {median(folders.values()):g}, most {count} ({largest.relative_to(repo)}), over 12: {sum(n > 12 for n in folders.values())}"
    pairs = {(name, other) for name, path in files.items() for other in imported(name, path, files.keys())}
    for label, depth in (("modules", None), ("rooms", 2), ("inner rooms", 3)):
        chosen = pairs
        if depth == 3:  # rooms within a room: folders of folders
            inner = {f"{p.parent.relative_to(repo)}".replace("/", ".") for p in files.values()}
            chosen = {
                (a, b)
                for a, b in pairs
                if all(name.count(".") > 1 and ".".join(name.split(".")[:3]) in inner for name in (a, b))
                and a.split(".")[1] == b.split(".")[1]
            }
        edges = arrows(chosen, depth)
        rings = circles(edges)
        yield f"{'arrows of ' + label:24} {len(edges)}, circles: {len(rings)}" + "".join(
            f"\n{'':25}{len(ring)}: {', '.join(sorted(name.removeprefix('zoo.') for name in ring))[:200]}"
            for ring in rings
        )
    yield f"words of README          {len((repo / 'README.md').read_text().split())}"


if __name__ == "__main__":
    print(*report(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()), sep="\n")
