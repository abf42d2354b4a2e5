"""The results in results/, each what `zoo bench train` wrote with out=, as the tables of docs/benchmarks.md.

python -m benchmarks.tables               writes the tables into the page
python -m benchmarks.tables NAME [KEY=VALUE ...]    runs the command of results/NAME.json again, into ./NAME.json
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from zoo.files import write_atomically
from zoo.types import JsonObject

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
Line = JsonObject

# What each row of the first table measures, and its result.
MEASURED = (
    ("Qwen3.5-VL 2B, 16 samples a row", "packed-16-2026-11-27"),
    ("Qwen3.5-VL 2B, 16 a row, FlashQLA, FP8", "packed-16-flash-qla-8-bit-fp8"),
    ("Qwen3.5-VL 2B, 4 a row, CUDA graphs", "receipts-2b-rows-of-4-graphs"),
    ("Qwen3.5-VL 2B, JPEG pages", "pages"),
    ("Qwen3-VL 4B, 6 samples a row", "qwen3-vl-4b-2026-11-27"),
    ("Qwen3-VL 4B, 12 a row, 8-bit moments", "qwen3-vl-4b-rows-of-12"),
    ("Qwen3-VL 4B, 12 a row, 8-bit moments, FP8", "qwen3-vl-4b-rows-of-12-fp8"),
    ("Qwen2.5-Omni 3B, pages, videos, speech", "mixture"),
    ("Qwen3.5-VL 2B, DP 4", "row-4gpus"),
    ("Qwen3.5-VL 2B, CP 2", "row-cp2-whole"),
    ("Qwen3.5-VL 2B, TP 2, CUDA graphs", "small-rows-tp2-graphs"),
    ("Qwen3-VL 30B-A3B, EP 4, trained router", "30b-ep4-trained-router-ahead"),
    ("Qwen3-VL 30B-A3B, EP 4, random router", "30b-ep4-ahead"),
    ("Qwen3-VL 30B-A3B, EP 4, even experts", "30b-ep4-even-ahead"),
    ("Qwen3 30B-A3B, text, EP 4, even experts", "text-30b-ep4-even"),
    ("LoRA, Qwen3.5-VL 2B, CUDA graphs", "lora-2b-graphs-8"),
    ("LoRA, Qwen3-VL 30B-A3B", "lora-30b-ep1"),
    ("LoRA, Qwen3-VL 30B-A3B, EP 2 x DP 2", "lora-30b-ep2-4gpus"),
    ("LoRA, Qwen3-VL 30B-A3B, EP 2, files", "lora-30b-a3b-files"),
    ("LoRA, Qwen3.5 35B-A3B, EP 2, files", "lora-35b-a3b-files"),
)
PUBLISHED = 13_011  # tokens/s a GPU: Megatron-Bridge, Qwen3 30B-A3B, 16 H100s, balance of experts forced
# Title of zoo's side and of the other, and result, setting and backend of each.
COMPARED = (
    ("Qwen3.5-VL 2B, 16 a row", ("receipts-2b", "packed:16"), "transformers, 4 padded", ("receipts-2b", "hf:4")),
    ("Qwen3-VL 4B, 6 a row", ("qwen3-vl-4b", "packed:6"), "transformers, 2 padded", ("qwen3-vl-4b", "hf:2")),
    ("4 layers of 30B-A3B, 12 a row", ("qwen3-vl-moe", "packed:12"), "transformers, 2 padded", ("qwen3-vl-moe", "hf:2")),
    ("Qwen3.5-VL 2B, 16 a row", ("receipts-2b", "packed:16"), "zoo, 8 padded to the longest", ("receipts-2b", "padded:8")),
    ("Qwen3.5-VL 2B, 16 a row", ("receipts-2b", "packed:16"), "zoo, 8 padded to 2,048", ("receipts-2b", "padded:8x2048")),
    ("torch backend", ("receipts-2b-te", "packed:16", "torch"), "Transformer Engine", ("receipts-2b-te", "packed:16", "te")),
    ("DP 4", ("row-4gpus", "row:16384"), "one GPU of the machine", ("row-4gpus-nproc1", "row:16384")),
    ("CP 2, rows of 32,768", ("row-cp2-whole", "row:32768"), "one GPU, rows of 16,384", ("row-1gpu-2026-11-27", "row:16384")),
)  # fmt: skip


def result(name: str) -> Path:
    """The file of a result, whose GPU stands before its name."""
    return RESULTS / f"h200-{name}.json"


def read(name: str) -> JsonObject:
    """The result of that name."""
    report: JsonObject = json.loads(result(name).read_text(encoding="utf-8"))
    return report


def cited() -> set[str]:
    """Names of the results in the tables."""
    pairs = [side[0] for row in COMPARED for side in (row[1], row[3])]
    return {name for _, name in MEASURED} | set(pairs)


def rate(name: str, setting: str, backend: str | None = None) -> float:
    """Real tokens a second and GPU of a setting."""
    line = next(line for line in read(name)["lines"] if line["name"] == setting and backend in (None, line["backend"]))
    return float(line["real_tokens_per_s"]) / int(line["ranks"])


def measured() -> str:
    """zoo's own results."""
    rows = []
    for title, name in MEASURED:
        line = read(name)["lines"][0]
        numbers = (
            f"{line['ranks']}",
            f"{line['real_tokens_per_s'] / line['ranks']:,.0f}",
            f"{line['mfu']:.1%}",
            f"{line['ms']:,.0f}",
            f"{line['peak_gib']:.1f}",
        )
        rows.append((title, *numbers, f"`{name}`"))
    return table(("", "GPUs", "tokens/s a GPU", "MFU", "ms", "GiB", "result"), rows)


def compared() -> str:
    """zoo against others, and against itself."""
    rows = []
    for title, mine, other, theirs in COMPARED:
        ours, others = rate(*mine), rate(*theirs)
        rows.append((title, f"{ours:,.0f}", other, f"{others:,.0f}", f"{ours / others:.2f}", f"`{mine[0]}`"))  # fmt: skip
    text = "text-30b-ep4-even"
    ours = rate(text, "row:10240")
    rows.append(("Qwen3 30B-A3B, text, EP 4", f"{ours:,.0f}", "Megatron-Bridge, 16 H100s", f"{PUBLISHED:,}", f"{ours / PUBLISHED:.2f}", f"`{text}`"))  # fmt: skip
    return table(("zoo", "tokens/s a GPU", "against", "tokens/s a GPU", "ratio", "result"), rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def filled(page: str) -> str:
    """The page with its tables, each between `<!-- NAME -->` and `<!-- end -->`."""
    for name, made in (("measured", measured()), ("compared", compared())):
        before, _, rest = page.partition(f"<!-- {name} -->\n")
        _, _, after = rest.partition("<!-- end -->")
        page = f"{before}<!-- {name} -->\n\n{made}\n\n<!-- end -->{after}"
    return page


def command(name: str) -> list[str]:
    """The command of a result, without the program."""
    return shlex.split(read(name)["command"])[1:]


def main(arguments: Sequence[str]) -> int:
    """Fill the page, or run a result's command again."""
    if not arguments:
        write_atomically(PAGE, filled(PAGE.read_text(encoding="utf-8")))
        return 0
    name, *further = arguments
    if not result(name).is_file():
        names = sorted(path.stem.removeprefix("h200-") for path in RESULTS.glob("*.json"))
        print(f"{name}: no such result; there are {', '.join(names)}", file=sys.stderr)
        return 2
    again = [sys.executable, "-m", "zoo", *command(name), f"out={name}.json", *further]
    return subprocess.run(again, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
