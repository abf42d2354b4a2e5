"""Entry of the command `zoo`: finds the subcommand, runs it, and turns a user's mistake into one line and exit code 2.

Nothing heavy is imported before the subcommand needs it, so that `zoo --help` answers at once.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from types import FrameType

from zoo import __version__
from zoo.errors import UserError, file_error, printable_lines

# subcommand -> module with run(arguments) -> exit code, and what it does
SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "train": ("zoo.cli.runs.train", "train a model from a recipe"),
    "init": ("zoo.cli.recipes.init", "write a recipe for your data and model, asking for both"),
    "list": ("zoo.cli.recipes.list", "show model families, recipes, sizes and hardware overlays"),
    "show": ("zoo.cli.recipes.show", "show a resolved recipe, or every key there is"),
    "plan": ("zoo.cli.recipes.plan", "parameters, memory and FLOPs of a run before it is launched"),
    "report": ("zoo.cli.runs.report", "a page about a run, or several compared"),
    "inspect": ("zoo.cli.runs.inspect", "real packed rows as a picture and a page; lengths and padding"),
    "convert": ("zoo.cli.checkpoints.convert", "Hugging Face checkpoints to zoo's and back"),
    "verify": ("zoo.cli.checkpoints.verify", "compare two checkpoints, tensors and log-probabilities"),
    "generate": ("zoo.cli.checkpoints.generate", "a model's answers: to a prompt with files, to rows, in a chat"),
    "speak": ("zoo.cli.checkpoints.speak", "speech of a model's answers to rows: codes, audio, and rows to train on"),
    "eval": ("zoo.cli.checkpoints.eval", "scores of a model's answers to held-out rows"),
    "score": ("zoo.cli.checkpoints.score", "log-probabilities of the answers of a file's rows"),
    "doctor": ("zoo.cli.runs.doctor", "check the kernels that training would use on this machine"),
    "bench": ("zoo.cli.runs.bench", "measure parts of zoo on this machine"),
    "new-family": ("zoo.cli.recipes.new_family", "lay out a model family, with tests that say what to fill in"),
    "completion": ("zoo.cli.completion", "tab completion for bash and zsh"),
}

_RANKED = ("train", "generate", "speak", "eval", "score")  # whose process is a rank under torchrun and SLURM

# subcommand -> what others call it
_ALIKE = {
    "train": "sft finetune fine-tune pretrain pt dpo kto rlhf rm tune lora run launch fit",
    "generate": "chat infer inference predict api serve deploy ask",
    "eval": "evaluate evaluation test benchmark",
    "convert": "export merge merge-lora merge_lora",
    "doctor": "env check diagnose",
    "show": "config schema describe info",
    "list": "ls models recipes families",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # transformers warns of keys that configs of published models have and zoo checks itself; ranks inherit this.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with _ctrl_c_noted() as came:
        try:
            code = _run(arguments)
            sys.stdout.flush()
            return code
        except KeyboardInterrupt as interrupt:
            return _interrupted(interrupt)
        except Exception as error:
            if came:  # and a library has made another exception of it
                return _interrupted(KeyboardInterrupt())
            return _failed(error)


@contextmanager
def _ctrl_c_noted() -> Iterator[list[int]]:
    """A list that is no longer empty once Ctrl-C has raised KeyboardInterrupt; a run handles its signals itself."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    if threading.current_thread() is not threading.main_thread():  # Python delivers signals to that one alone
        yield came
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def _failed(error: Exception) -> int:
    """Print a user's mistake, or that a rank has failed, and return its exit code; raises any other error."""
    if isinstance(error, UserError):
        return _refuse(str(error))
    launcher = sys.modules.get("zoo.launch.launcher")  # which starts ranks
    if launcher is not None and isinstance(error, launcher.WorkerError):
        if not error.reported:
            print(f"zoo: {error.line}", file=sys.stderr)
        return error.code
    if isinstance(error, BrokenPipeError):  # `zoo list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    mistake = file_error(error) if isinstance(error, OSError) else None
    if mistake is None:
        raise error
    return _refuse(str(mistake))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_HELP.format(subcommands="\n".join(f"  {name:<10} {doc}" for name, (_, doc) in SUBCOMMANDS.items())))
        return 0
    subcommand, *rest = arguments
    if subcommand in ("-V", "--version", "version"):
        print(f"zoo {__version__}")
        return 0
    if subcommand not in SUBCOMMANDS:
        if subcommand.startswith("-"):
            near = get_close_matches(subcommand, ("--help", "--version"), n=1) or ["--help"]
            raise UserError(f"{subcommand}: no such option; nearest: zoo {near[0]}")
        alike = next((name for name, words in _ALIKE.items() if subcommand.lower() in words.split()), None)
        if alike == "train":
            from zoo.cli.arguments import refuse_foreign, split_flags

            refuse_foreign(split_flags(rest, ())[1])
        near = [alike] if alike else get_close_matches(subcommand, SUBCOMMANDS, n=1) or list(SUBCOMMANDS)
        raise UserError(f"{subcommand}: no such verb; nearest: {', '.join(f'zoo {name}' for name in near)}")
    if subcommand != "completion":  # which is asked at each Tab, and imports nothing that could speak
        from zoo.packages import check_versions
        from zoo.parallel.process_state import quiet

        check_versions()
        quiet()
    module = importlib.import_module(SUBCOMMANDS[subcommand][0])
    if any(argument in ("-h", "--help") for argument in rest):
        print((module.__doc__ or "").strip())
        return 0
    templates = any(argument.endswith("-template") for argument in rest)
    if subcommand in _RANKED and not templates and "SLURM_PROCID" in os.environ:
        from zoo.launch.slurm import join_slurm

        join_slurm()  # for the whole command: what is said after the ranks have ended is said by rank 0 alone
    return module.run(rest)


_HELP = """\
usage: zoo VERB [key=value ...]

Trains vision-language and omni models on Megatron-Core, from a recipe of a few lines.

{subcommands}

  zoo VERB --help    what a verb takes
  zoo --version

start with:  zoo list
             zoo train recipe=qwen3_omni_sft"""


def _interrupted(interrupt: KeyboardInterrupt) -> int:
    """Say so, once a run; the exit code of Ctrl-C, or that on which a cluster starts the command again."""
    from zoo.parallel.signals import INTERRUPTED, PREEMPTED, Preempted

    preempted = isinstance(interrupt, Preempted)
    if os.environ.get("RANK", "0") == "0":
        print(f"zoo: {'preempted' if preempted else 'interrupted'}", file=sys.stderr)
    return PREEMPTED if preempted else INTERRUPTED


def _refuse(message: str) -> int:
    """Print the user's mistake; under torchrun with the rank that found it."""
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f" (rank {rank})"
    print(f"zoo: error{where}: {printable_lines(message)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
