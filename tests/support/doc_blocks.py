"""The blocks of the documentation's pages, what stands for the things that they name, and what is not run, with the reason."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).parents[2]
PAGES = [
    path
    for path in (
        *sorted(REPO.glob("*.md")),
        REPO / "examples" / "README.md",
        REPO / "benchmarks" / "README.md",
        *sorted((REPO / "docs").glob("**/*.md")),
        *sorted(REPO.glob("models/*/README.md")),
    )
    if path.is_file()
]
LANGUAGES = ("bash", "python", "text", "yaml", "json", "toml")

# Commands, outputs and Python that are not run, by their beginning. unit/test_docs.py resolves each command: verb, flags, recipe and keys.
NOT_RUN = {
    r"make |pip |source |pre-commit |docker ": "changes the environment or the machine; test_wheel.py and continuous integration do so",
    r"python -m pytest|python tests/": "the tests that it names are run by themselves",
    r"python examples/": "tests/cli/test_examples.py runs it",
    r"python -m (lmms_eval|verl|sglang)|from zoo.rl.integrations|vllm |transformers |curl ": "another program, or its server",
    r"zoo verify .*served=": "starts vLLM; tests/slow/test_served.py does, where there is one",
    r"zoo doctor .*size=2b": "measures a GPU",
    r"python -m benchmarks|zoo bench (train|saves)": "measures for minutes to hours; tests/unit/bench runs it small",
    r"zoo bench data ": "encodes rows for minutes; tests/unit/bench has it small",
    r"zoo train .*-template|torchrun --nnodes": "needs a cluster and 16 GPUs; test_launchers.py has it",
    r"zoo new-family ": "writes into the clone itself; tests/cli/test_new_family.py runs it elsewhere",
    r"zoo inspect runs/mine step=": "needs a bad step; tests/cli/test_bad_steps.py has them",
    r"zoo train their\.yaml": "a file of another trainer, which is refused; tests/unit/config/test_foreign_files.py has them",
    r"zoo generate \S+$": "a chat needs a terminal; tests/distributed/test_generate.py has one",
    r"layout = ": "a table of calls, each for other shapes; tests/unit/packing has them",
    r"k <= W ": "formulas",
    r"zoo: rank 1 got no further": "tests/distributed/test_hangs.py lets a rank hang",
    r"zoo: error: .* was saved under another recipe": "tests/unit/config/test_resume.py changes each key",
}
PAGES_NOT_RUN = {
    "CHANGELOG.md": "tells what changed, also of earlier versions",
    "docs/architecture.md": "draws which room imports which",
    "docs/benchmarks.md": "tells how GPUs were measured, for hours",
    "docs/decisions.md": "tells how GPUs were measured, for hours",
}
# What the pages name, and what stands for it.
STAND_INS = {
    r"Qwen/Qwen3-VL-\w+-Instruct": "hub/tiny",
    r"/(shared|local)/": r"\1/",
    r"zoo/data/digits/": "digits/",
    r"(nproc|parallel\.tp)=8\b": r"\1=1",
    r"(steps|every|max_rows)=(\d+)00\b": r"\1=\2",  # hundreds of steps become steps
}
# What makes a command take seconds, where it does not say so itself.
SMALL = {
    "train": ("train.steps=2", "nproc=1", "train.eval_rows=4"),
    "eval": ("max_rows=2", "max_new_tokens=4"),
    "generate": ("max_new_tokens=4",),
    "score": ("max_rows=2",),
    "inspect": ("samples=20",),
}
# Python blocks that are pieces: what stands before them.
BEFORE = {
    "docs/packing.md": "import torch\nmask = torch.ones(2, 8, dtype=torch.bool)\nids = labels = torch.zeros(2, 8, dtype=torch.long)\n"
    "positions = torch.zeros(3, 2, 8, dtype=torch.long)\n",
    "docs/checkpoints.md": "import zoo\n",
}
# Outputs of a model that has learned, where what is run here has not: words are compared, numbers are not.
OTHER_NUMBERS = {"README.md": "tests/slow/test_learns.py trains the demo to its end"}


class Block(NamedTuple):
    """A fenced block, or a command in the text between them."""

    language: str
    text: str


def blocks_of(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page in order; of some languages, or all."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```|`(zoo [a-z-]+ [^`\n]+)`", text, re.MULTILINE | re.DOTALL)
    blocks = [Block("bash", inline) if inline else Block(language, body) for language, body, inline in found]
    return [block for block in blocks if not languages or block.language in languages]


def commands_of(block: Block) -> list[str]:
    """The lines of a bash block, without remarks; a line that ends in a backslash goes on in the next."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return list(filter(None, (re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines)))


def why_not_run(text: str) -> str | None:
    """The pattern of NOT_RUN that a command or block begins with."""
    return next((pattern for pattern in NOT_RUN if re.match(pattern, text)), None)


def with_stand_ins(text: str) -> str:
    """The text with what is there in the place of hub ids, folders of other machines and hundreds of steps."""
    for pattern, stand_in in STAND_INS.items():
        text = re.sub(pattern, stand_in, text)
    return text


def small(command: str) -> list[str]:
    """The arguments of `zoo` for a command of a page, of a size that takes seconds."""
    words = shlex.split(with_stand_ins(command))
    if words[0] == "torchrun":
        words = [*words[words.index("zoo") :], "nproc=2"]  # by zoo's own launcher
    _, verb, *rest = words
    given = {word.partition("=")[0] for word in rest}
    added = [text for text in SMALL.get(verb, ()) if text.partition("=")[0] not in given]
    if verb == "train" and "data.train" in given:  # without rows to evaluate on, unless it gives some
        added.remove("train.eval_rows=4")
    if verb == "score" and "top_k" in given:  # a teacher scores all rows
        added = []
    if verb == "generate" and "rows" in given and "max_rows" not in given:
        added.append("max_rows=2")
    return [verb, *rest, *added]
