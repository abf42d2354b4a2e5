"""A program or notebook that calls zoo has the process it had before, whatever became of the call."""

import json
import subprocess
import textwrap
from pathlib import Path

import pytest
from support.commands import Zoo, python

pytestmark = pytest.mark.slow

FAULTS = Path(__file__).parents[1] / "support" / "faults"
HEAD = """
import logging, os, random, resource, signal, sys, threading, time, warnings
import numpy, torch, transformers
import torch.distributed
import megatron.core.dist_checkpointing.serialization, megatron.core.optimizer.distrib_optimizer
import megatron.core.tensor_parallel.random, megatron.core.transformer.moe.token_dispatcher
from torch.overrides import _get_current_function_mode_stack
import zoo, zoo.training.trainer, zoo.tools.score, zoo.tools.convert, zoo.launch.launcher

ARGUMENTS = json.loads(sys.argv[1])
FOLDER = sys.argv[2]

def recipe(*more):
    values = dict(text.partition("=")[::2] for text in [*ARGUMENTS, *more])
    return zoo.load_recipe(values.pop("recipe"), [f"{k}={v}" for k, v in values.items()])

def names(module):
    return {f"{module.__name__}.{k}": id(v) for k, v in vars(module).items() if not k.startswith("__")}

def state():
    megatron = [m for n, m in sys.modules.items() if n.startswith("megatron.core") and m is not None]
    found = {
        "modes": len(_get_current_function_mode_stack()), "type": torch.ones(1).type(), "cuda": names(torch.cuda),
        "torch": names(torch), "environment": dict(os.environ), "folder": os.getcwd(), "filters": list(warnings.filters),
        "threads": sorted(t.name for t in threading.enumerate() if not t.name.startswith(("pytest", "send"))), "torch threads": torch.get_num_threads(),
        "signals": {n: signal.getsignal(n) for n in (2, 15, 10, 1, 3, 14)}, "dtype": torch.get_default_dtype(),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32),
        "random": random.getstate(), "numpy": numpy.random.get_state()[1].tolist(), "generator": torch.get_rng_state().tolist(),
        "groups": torch.distributed.is_initialized(), "hooks": (sys.excepthook, threading.excepthook),
        "logs": [(n, l.level, list(l.filters), list(l.handlers)) for n in ("", "megatron", "torch", "transformers", "torch.utils.cpp_extension") for l in [logging.getLogger(n)]],
        "limits": [resource.getrlimit(n) for n in range(10)], "gradients": torch.is_grad_enabled(),
        "optimizer": {k: id(v) for k, v in vars(megatron_optimizer()).items()},
    }
    for module in megatron:
        found[module.__name__] = {k: v for k, v in names(module).items() if callable(getattr(module, k.rpartition(".")[2], None))}
    return found

def megatron_optimizer():
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    return DistributedOptimizer

def unchanged(what, call):
    torch.manual_seed(5), random.random(), numpy.random.random()
    before = state()
    try:
        result = call()
    except BaseException as error:
        result = error
    after = state()
    wrong = {k: (before[k], after[k]) for k in before if before[k] != after[k]}
    shown = {k: {n: (a[n], b.get(n)) for n in a if a[n] != b.get(n)} if isinstance(a, dict) else (str(a)[-300:], str(b)[-300:]) for k, (a, b) in wrong.items()}
    assert not wrong, f"{what}: {shown}"
    return result
"""


def call(zoo: Zoo, folder: Path, program: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A program of one's own, with a run's arguments."""
    arguments = zoo.train_arguments(folder / "run", "log.tensorboard=false", "log.predictions=0", *options)[1:]
    text = "import json, sys\n" + HEAD + textwrap.dedent(program)
    return python("-c", text, json.dumps(arguments), folder, **env)


def test_nothing_is_left_behind(zoo: Zoo, tmp_path: Path) -> None:
    program = """
        ids = torch.arange(5, 25).view(2, 10)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        drawn = ("random", "numpy", "generator")  # by `unchanged` itself
        for _ in range(2):
            before = state()
            with zoo.Engine.open(recipe("train.steps=2")) as engine:
                found = unchanged("logprobs", lambda: engine.logprobs(batch))
                assert found.shape == (2, 10), found
                stepped = unchanged("step", lambda: engine.train_step(batch, lambda logprobs, rows: -logprobs.sum()))
                assert stepped.applied, stepped
                assert unchanged("weights", lambda: len(list(engine.hf_weights())))
            after = state()
            changed = {k: [n for n in before[k] if before[k][n] != after[k].get(n)] if isinstance(before[k], dict) else "" for k in before if before[k] != after[k] and k not in drawn}
            assert not changed, changed

        plan = unchanged("plan", lambda: zoo.plan(recipe(), 1))
        assert plan.fits is not False, plan
        result = unchanged("train", lambda: zoo.train(recipe("train.steps=2")))
        assert result.steps == 2, result
        again = unchanged("train again", lambda: zoo.train(recipe("train.steps=3")))
        assert again.steps == 3, again
        export = FOLDER + "/run/export"
        rows = unchanged("score", lambda: zoo.score(export, values["data.eval"], ["hardware=cpu"]))
        assert rows and rows[0]["logprobs"], rows
        here = unchanged("score here", lambda: zoo.score(export, values["data.eval"], ["hardware=cpu"], in_process=True))
        assert here == rows
        native = unchanged("convert", lambda: zoo.convert(export, FOLDER + "/native", quiet=True))
        verified = unchanged("verify", lambda: zoo.verify(export, FOLDER + "/native"))
        assert not isinstance(verified, BaseException), verified
        wrong = unchanged("no such rows", lambda: zoo.score(export, "nowhere.jsonl"))
        assert type(wrong).__name__ in ("UserError", "ConfigError"), wrong
        wrong = unchanged("not that many", lambda: zoo.train(recipe("packing.budget=8", "train.steps=9")))
        assert isinstance(wrong, ValueError), repr(wrong)

        from transformers import LlamaConfig, LlamaForCausalLM
        torch.manual_seed(0)
        sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ids = torch.arange(16)[None]
        losses = []
        for _ in range(20):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward(), optimizer.step(), optimizer.zero_grad()
            losses.append(float(loss))
        assert losses[-1] < losses[0]
        print("all well")
    """
    program = program.replace('values["data.eval"]', repr(str(zoo.data / "heldout.jsonl")))
    done = call(zoo, tmp_path, program)
    assert done.returncode == 0 and done.stdout.endswith("all well\n"), done


def test_a_run_that_hangs_and_one_that_is_interrupted_leave_the_caller_alive(zoo: Zoo, tmp_path: Path) -> None:
    program = """
        found = unchanged("hang", lambda: zoo.train(recipe("run.hang_timeout=0.05", "train.steps=30")))
        assert type(found).__name__ == "WorkerError" and "got no further for 3 s" in str(found), repr(found)
        os.environ.pop("FAULT")

        def interrupt(times):
            log = FOLDER + "/run/train.jsonl"
            size = os.path.getsize(log)
            while os.path.getsize(log) == size:
                time.sleep(0.05)
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)

        def train(times):
            thread = threading.Thread(target=interrupt, args=(times,), name="send")
            thread.start()
            try:
                return zoo.train(recipe("train.steps=4000"))
            finally:
                thread.join()

        found = unchanged("Ctrl-C", lambda: train(1))
        assert found.interrupted, repr(found)
        found = unchanged("Ctrl-C twice", lambda: train(2))
        assert isinstance(found, KeyboardInterrupt) or found.interrupted, repr(found)
        print("alive")
    """
    done = call(zoo, tmp_path, program, "export=false", FAULT="0 4 hang", PYTHONPATH=str(FAULTS))
    assert done.returncode == 0 and done.stdout.endswith("alive\n"), done


def test_groups_of_somebody_else_are_left_alone() -> None:
    program = """
        import torch.distributed as dist
        from zoo.config.schema import Recipe
        from zoo.parallel.world import open_world
        from zoo.errors import UserError
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with open_world(Recipe()):
                raise SystemExit("it went on")
        except UserError as error:
            assert "torch.distributed is in use" in str(error)
        assert dist.is_initialized() and torch.ones(1).type() == "torch.FloatTensor"
    """
    done = python("-c", "import torch\n" + textwrap.dedent(program))
    assert done.returncode == 0, done
