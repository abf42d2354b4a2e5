"""`zoo.Engine` gives transformers' log-probabilities, entropies and gradients of a loop's loss, for every family.

Rows with media of several turns, padded on the left, on the right or both by turns, in micro-batches of a token budget.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine import Zoo
from support.loops import differing, engine_recipe, grpo, held_by, hf_values, loop_batch, loop_examples
from support.matrix import MODELS
from support.pairs import assert_hf_gradients
from support.tiny import load_plain, load_thinker
from torch import Tensor

import zoo

LOGPROBS, GRADIENTS = 2e-5, 2e-5
CASES = [(name, "mixed") for name in MODELS] + [("dense", "left"), ("omni", "left"), ("deepstack", "right")]


@pytest.mark.parametrize(
    ("name", "side"),
    [pytest.param(*case, marks=[] if case == ("dense", "mixed") else pytest.mark.slow) for case in CASES],
)
def test_values_and_gradients_are_those_of_transformers(name: str, side: str, tmp_path: Path) -> None:
    model = MODELS[name]
    folder = model.write(tmp_path / "model")
    hf = load_thinker(folder)
    examples = loop_examples(folder, model)
    batch = loop_batch(examples, side)
    wanted = hf_values(hf, examples, batch, temperature=0.7)
    budget = f"packing.budget={max(example.length for example in examples) + 8}"
    with zoo.Engine.open(engine_recipe(folder, model, budget)) as engine, torch.no_grad():
        every = {key: value for key, value in batch.items() if key != "loss_mask"}
        assert float((engine.logprobs(every, temperature=0.7) - wanted.logprobs).abs().max()) < LOGPROBS
        assert float((engine.entropy(every, temperature=0.7) - wanted.entropy).abs().max()) < LOGPROBS

        chosen = batch["loss_mask"].bool()
        found = engine.logprobs(batch, temperature=torch.full((len(examples),), 0.7))
        assert float((found - wanted.logprobs * chosen).abs().max()) < LOGPROBS
        assert not bool(found[~chosen].any())

        outcome = engine.train_step(batch, grpo, temperature=0.7, entropy=True, update=False)
        tokens = int((chosen & (wanted.logprobs != 0)).sum())
        with torch.enable_grad():
            loss, _ = grpo(wanted.logprobs * chosen, batch, entropy=wanted.entropy)
            (loss / tokens).backward()
        assert (outcome.tokens, outcome.metrics["rows"]) == (tokens, len(examples))
        assert outcome.micro_batches > 1 and outcome.metrics["clipped"] > 0
        assert outcome.loss == pytest.approx(float(loss.detach()) / tokens, abs=1e-5)
        assert not differing(engine, tmp_path / "export")
        found = Zoo(engine.recipe, engine._parts.assembly, torch.nn.Identity(), None)
        assert_hf_gradients(found, held_by(engine).gradients, hf, model.publish, GRADIENTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "deepstack"])
def test_adapters_are_merged_or_by_themselves(name: str, tmp_path: Path) -> None:
    """Merged they are what transformers and PEFT make of the adapter's own tensors and config."""
    peft = pytest.importorskip("peft")
    model = MODELS[name]
    folder = model.write(tmp_path / "model")
    batch = loop_batch(loop_examples(folder, model))
    lora = ("lora.rank=4", "lora.alpha=8", f"run.dir={tmp_path / 'run'}", "train.lr=0.05", "packing.budget=4096")
    with zoo.Engine.open(engine_recipe(folder, model, *lora)) as engine:
        plain = engine.logprobs(batch)
        for _ in range(2):
            engine.train_step(batch, grpo)
        with engine.without_adapters():
            torch.testing.assert_close(engine.logprobs(batch), plain, rtol=0, atol=0)
        merged = dict(engine.hf_weights())
        tensors, config = engine.adapter_weights()
        adapter = {key: tensor.clone() for key, tensor in tensors}
        found = engine.logprobs(batch)
    original = {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}
    moved = [key for key, tensor in merged.items() if not torch.equal(tensor, original[key])]
    assert moved and adapter and len(moved) < len(merged)
    (tmp_path / "adapter").mkdir()
    save_file(adapter, tmp_path / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with_adapter = peft.PeftModel.from_pretrained(load_plain(folder), tmp_path / "adapter").eval()
    with torch.no_grad():
        wanted = hf_values(with_adapter, loop_examples(folder, model), batch).logprobs * batch["loss_mask"]
    assert float((found - wanted).abs().max()) < 1e-4


@pytest.mark.slow
def test_recomputed_layers_take_the_given_experts_too(tmp_path: Path) -> None:
    """Experts that no router would choose give the same gradient with layers kept and recomputed."""
    model = MODELS["deepstack"]
    folder = model.write(tmp_path / "model")
    batch = loop_batch(loop_examples(folder, model))

    def gradients(recompute: str, routing: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
        overrides = (f"engine.recompute={recompute}", "packing.budget=4096")
        with zoo.Engine.open(engine_recipe(folder, model, *overrides)) as engine:
            _, own = engine.logprobs_and_routing(batch)
            given = {} if routing is None else {"routing": routing}
            engine.train_step({**batch, **given}, grpo, update=False)
            return {name: grad.clone() for name, grad in held_by(engine).gradients.items()}, own

    plain, own = gradients("none")
    other = torch.where(own >= 0, (own + 1) % (int(own.max()) + 1), own)
    kept = gradients("none", other)[0]
    assert max(float((plain[name] - grad).abs().max()) for name, grad in kept.items()) > 1e-3, "replay changed nothing"
    for recompute in ("selective", "full"):
        recomputed = gradients(recompute, other)[0]
        assert max(float((kept[name] - grad).abs().max()) for name, grad in recomputed.items()) < 1e-6
