"""`zoo.Engine` in one process: the example of its page, memory that is given back, and what it leaves behind."""

import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zoo
from zoo.errors import UserError
from zoo.optim.adamw import optimizers

PAGE = Path(__file__).parents[3] / "docs" / "engine.md"
TINY = ["size=tiny", "hardware=cpu", "engine.threads=1", "train.lr=1e-3"]


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    with zoo.Engine.open(zoo.load_recipe("qwen3_vl_sft", [*TINY, *getattr(request, "param", ())])) as opened:
        yield opened


def text_batch() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(3)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[0, :4], mask[1, 7:] = False, False
    return {"input_ids": torch.randint(5, 200, (3, 9), generator=draw), "attention_mask": mask}


def likelihood(logprobs: Tensor, batch: dict[str, Any]) -> Tensor:
    return -logprobs.sum()


def test_the_example_of_the_page_learns(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), scope)
    steps = [line for line in capsys.readouterr().out.splitlines() if re.match(r"\d ", line)]
    chances = [[float(x) for x in re.findall(r"0\.\d+|\d\.\d+e-\d+", line.partition("tensor")[2])] for line in steps]
    assert len(chances) == 4
    assert chances[-1][1] > chances[0][1] and chances[-1][0] < chances[0][0]
    assert scope["tensor"].numel() and "." in scope["name"]
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("engine", "state_bytes"),
    [
        pytest.param((), 8, id="fp32"),  # both moments in fp32
        pytest.param(("engine.precision=bf16",), 10, id="bf16", marks=pytest.mark.slow),  # and 16 bits of each weight
        pytest.param(("train.exp_avg_dtype=fp8",), 5, id="8 bits", marks=pytest.mark.slow),
    ],
    indirect=["engine"],
)
def test_memory_is_given_back_and_taken_again(engine: Any, state_bytes: int) -> None:
    batch = text_batch()
    engine.train_step(batch, likelihood)  # so that there is a state
    before = engine.logprobs(batch)
    weights = {name: tensor.clone() for name, tensor in engine.hf_weights()}
    moved = engine.to("cpu", optimizer=False, gradients=False)
    parameters = [p for chunk in engine._parts.chunks for p in chunk.parameters()]
    assert moved.optimizer == moved.gradients == 0
    assert moved.model >= sum(p.numel() * p.element_size() for p in parameters) > 0
    assert {p.untyped_storage().nbytes() for p in parameters} == {0}
    calls = (engine.logprobs, lambda batch: engine.train_step(batch, likelihood), lambda _: next(engine.hf_weights()))
    for call in calls:
        with pytest.raises(UserError, match="model is on the host"):
            call(batch)
    rest = engine.to("cpu")
    buffers = [buffer for chunk in engine._parts.chunks for buffer in chunk.buffers]
    assert rest.model == 0 and rest.gradients >= 4 * sum(p.numel() for p in parameters)
    held = sum(p.numel() for p in parameters)
    assert state_bytes * held <= rest.optimizer < 1.02 * state_bytes * held
    assert all(buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in buffers)
    again = engine.to("cpu")
    assert (again.model, again.optimizer, again.gradients) == (0, 0, 0)
    back = engine.to("cuda")
    assert (back.model, back.optimizer, back.gradients) == (moved.model, rest.optimizer, rest.gradients)
    torch.testing.assert_close(engine.logprobs(batch), before, rtol=0, atol=0)
    for name, tensor in engine.hf_weights():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=0)


def test_training_goes_on_as_if_nothing_had_been_moved(engine: Any) -> None:
    batch = text_batch()
    engine.train_step(batch, likelihood)
    inner = list(optimizers(engine._parts.optimizer))
    assert inner and all(one.is_prepared() for one in inner), "found once"
    engine.to("cpu")
    engine.to("cuda")
    assert not any(one.is_prepared() for one in inner), "tensors lie elsewhere"
    engine.train_step(batch, likelihood)
    engine._parts.optimizer.zero_grad()  # as a foreign loop may: megatron-core's drops the views of the gradients
    assert not any(one.is_prepared() for one in inner)
    engine.train_step(batch, likelihood)
    found = engine.logprobs(batch)
    engine.close()
    with zoo.Engine.open(zoo.load_recipe("qwen3_vl_sft", TINY)) as other:
        for _ in range(3):
            other.train_step(batch, likelihood)
        torch.testing.assert_close(other.logprobs(batch), found, rtol=0, atol=0)


def test_what_an_engine_refuses(engine: Any) -> None:
    batch = text_batch()
    with pytest.raises(UserError, match=r"^lora.alpha=9.0: it has no effect without adapters"):
        zoo.Engine.open(zoo.load_recipe("qwen3_vl_sft", TINY).replace({"lora.alpha": 9}))
    with pytest.raises(UserError, match="parallel state is in use"):
        zoo.Engine.open(zoo.load_recipe("qwen3_vl_sft", TINY))
    with pytest.raises(UserError, match=r"lora\.rank is 0"):
        engine.adapter_weights()
    with pytest.raises(ValueError, match="does not depend on the log-probabilities"):
        engine.train_step(batch, lambda logprobs, rows: logprobs.detach().sum())
    with pytest.raises(ValueError, match="wanted one number"):
        engine.train_step(batch, lambda logprobs, rows: logprobs)
    with pytest.raises(UserError, match='wanted "cpu" or "cuda"'):
        engine.to("meta")
    outcome = engine.train_step(batch, lambda logprobs, rows: logprobs.sum() * float("nan"))
    assert not outcome.applied
    assert bool(engine.logprobs(batch).isfinite().all()), "a bad step is not applied"
    engine.close()
    with pytest.raises(UserError, match="the engine is closed"):
        engine.logprobs(batch)
    with zoo.Engine.open(zoo.load_recipe("qwen3_vl_sft", TINY), train=False) as scorer:
        assert torch.isfinite(scorer.logprobs(batch)).all()
        with pytest.raises(UserError, match="train=False"):
            scorer.train_step(batch, likelihood)


def test_a_closed_engine_holds_no_memory(engine: Any) -> None:
    engine.train_step(text_batch(), likelihood)
    parts = engine._parts
    buffers = [data for chunk in parts.chunks for b in chunk.buffers for data in (b.param_data, b.grad_data)]
    states = [value for one in optimizers(parts.optimizer) for state in one.state.values() for value in state.values()]
    assert len(states) > 3
    held = [*buffers, *states, *(p for chunk in parts.chunks for p in chunk.parameters()), parts.optimizer]
    left = [weakref.ref(one) for one in held]
    kept = dict(engine.hf_weights())
    copies = {name: tensor.clone() for name, tensor in kept.items()}
    del parts, buffers, states, held
    engine.close()
    assert [one() for one in left if one() is not None] == []
    for name, tensor in kept.items():
        torch.testing.assert_close(tensor, copies[name], rtol=0, atol=0)


def test_answers_are_a_batch_to_learn_from(engine: Any) -> None:
    rows = [{"messages": [{"role": "user", "content": f"Say {digit}"}]} for digit in (3, 7)]
    rows[0]["messages"].append({"role": "assistant", "content": "3"})
    options = {"samples": 3, "max_new_tokens": 4}
    found = engine.generate(rows, seed=1, **options)
    assert [one["reference"] for one in found.answers] == ["3"] * 3 + [None] * 3
    said = [one["token_ids"] for one in found.answers]
    assert [engine.generate(rows, seed=seed, **options).answers == found.answers for seed in (1, 2)] == [True, False]
    assert len({tuple(tokens) for tokens in said}) > 2, "draws are apart"
    for ids, mask, tokens in zip(found.batch["input_ids"], found.batch["loss_mask"], said, strict=True):
        kept = ids[mask].tolist()
        assert kept == tokens[: len(kept)]
    first = {name: value[:1] for name, value in found.batch.items()}
    before = engine.logprobs(first).sum()
    for _ in range(3):
        engine.train_step(first, likelihood)
    assert engine.logprobs(first).sum() > before


def test_a_saved_engine_goes_on_as_it_was(engine: Any, tmp_path: Path) -> None:
    batch = text_batch()
    engine.train_step(batch, likelihood)
    folder = engine.save(tmp_path / "saved", 5)
    assert folder.name == "iter_5"
    engine.train_step(batch, likelihood)
    wanted = engine.logprobs(batch)
    with zoo.Engine.open(zoo.load_recipe("qwen3_vl_sft", [*TINY, "run.seed=3"]), beside=engine) as other:
        assert not torch.allclose(other.logprobs(batch), wanted)
        assert other.load(tmp_path / "saved") == 5
        other.train_step(batch, likelihood)
        torch.testing.assert_close(other.logprobs(batch), wanted, rtol=0, atol=0)
        with pytest.raises(UserError, match="no checkpoint"):
            other.load(tmp_path)
        engine.close()
        torch.testing.assert_close(other.logprobs(batch), wanted, rtol=0, atol=0)  # groups last as long as any engine
    assert not dist.is_initialized()


@pytest.mark.parametrize("advance", [True, False])
def test_a_saved_engine_goes_on_with_the_same_masks_and_updates(advance: bool, tmp_path: Path) -> None:
    batch = text_batch()
    recipe = zoo.load_recipe("qwen3_vl_sft", [*TINY, "lora.rank=4", "lora.dropout=0.5", f"run.dir={tmp_path / 'run'}"])

    def steps(engine: Any, count: int) -> list[tuple[float, float]]:
        outcomes = []
        for _ in range(count):
            outcomes.append(engine.train_step(batch, likelihood, update=False))
            engine.update(advance=advance)
        return [(outcome.loss, outcome.lr) for outcome in outcomes]

    with zoo.Engine.open(recipe) as engine:
        engine.advance_schedule()
        steps(engine, 3)
        engine.save(tmp_path / "saved", 1)  # the loop's own number
        wanted = steps(engine, 3)
    with zoo.Engine.open(recipe) as engine:
        steps(engine, 1)
        assert engine.load(tmp_path / "saved") == 1
        assert steps(engine, 3) == wanted
    assert len(set(wanted)) == 3


def test_gradients_of_no_token_change_nothing(engine: Any) -> None:
    batch = text_batch()
    engine.train_step(batch, likelihood)  # moments that would move the weights
    before, rate = engine.logprobs(batch), engine.learning_rate
    first = torch.zeros(3, 9, dtype=torch.bool)
    first[0, 4] = first[1, 0] = True  # rows' first tokens, which nothing predicts
    for nothing in ({**batch, "loss_mask": first}, {name: value[:0] for name, value in batch.items()}):
        outcome = engine.train_step(nothing, likelihood)
        assert (outcome.tokens, outcome.loss, outcome.grad_norm, outcome.applied) == (0, 0.0, 0.0, False)
        engine.train_step(nothing, likelihood, loss_scale=1.0, update=False)
        assert engine.update() == (0.0, False)
    engine.train_step(batch, likelihood, update=False)
    engine.clear_gradients()
    assert engine.update() == (0.0, False)
    engine.train_step(batch, likelihood, update=False)
    engine.to("cpu", model=False, optimizer=False)
    engine.to("cuda")
    assert engine.update() == (0.0, False)
    torch.testing.assert_close(engine.logprobs(batch), before, rtol=0, atol=0)
    assert engine.learning_rate == rate
    engine.train_step(batch, likelihood, update=False)
    norm, applied = engine.update()
    assert norm > 0 and applied


def test_groups_of_the_caller_stay(engine: Any) -> None:
    engine.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        c10d: Any = dist.distributed_c10d
        mine = dist.new_group([0])
        before = set(c10d._world.pg_map)
        for _ in range(2):
            with zoo.Engine.open(zoo.load_recipe("qwen3_vl_sft", TINY), train=False) as opened:
                opened.logprobs(text_batch())
                assert set(c10d._world.pg_map) > before
            assert set(c10d._world.pg_map) == before
        dist.all_reduce(torch.ones(1), group=mine)
    finally:
        dist.destroy_process_group()
