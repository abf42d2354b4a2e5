"""Talkers read, predict and learn what transformers' do, which say the rows themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapted import with_adapters
from support.adapters import peft_gradients, published_gradients
from support.engine import Zoo, packed_batch, recipe_for
from support.gathered import worst as worst_gradient
from support.pairs import relative_errors, worst
from support.spoken import Pair
from support.spoken_qwen3 import Qwen3Pair
from support.spoken_qwen25 import Qwen25Pair
from support.tiny import load_plain
from support.weights import export, same, tensors

# Of Qwen3-Omni `accept_hidden_layer` 0, one behind which deepstack features are added, and the last one.
PAIRS: dict[str, tuple[type[Pair], dict[str, int]]] = {
    "qwen3 layer 0": (Qwen3Pair, {"accept_hidden_layer": 0}),
    "qwen3": (Qwen3Pair, {"accept_hidden_layer": 3}),
    "qwen3 layer 5": (Qwen3Pair, {"accept_hidden_layer": 5}),
    "qwen25": (Qwen25Pair, {}),
}
OPTIONS: dict[str, Any] = {"video_fps": 2.0, "max_frames": 8}


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: Any, tmp_path_factory: Any, cpu_world: Any) -> Pair:
    kind, config = PAIRS[request.param]
    return kind.load(tmp_path_factory.mktemp("talker"), cpu_world, **config)


OF_FAMILIES = pytest.mark.parametrize("pair", ["qwen3", "qwen25"], indirect=True)  # which layer is read changes nothing


def test_the_rows_that_transformers_said(pair: Pair) -> None:
    """All that its generation predicted, code by code, is what zoo predicts of a whole row at once, and what teacher forcing gives."""
    for row in pair.rows.values():
        (found,) = pair.logits([row.sample])
        wanted = [torch.stack(row.heard.logits)]
        if row.heard.residual:
            wanted.append(torch.stack(row.heard.residual).unflatten(0, found[1].shape[1::-1]).transpose(0, 1))
        assert len(wanted[0]) == 9 and worst(found, wanted) < 1e-5
        with torch.no_grad():
            assert worst(list(pair.teacher_forced(row))[: len(wanted)], wanted) < 1e-5


@pytest.mark.parametrize("packing", [{}, {"align": 4}], ids=str)
def test_packed_rows(packing: dict, pair: Pair) -> None:
    for found, row in zip(pair.logits(pair.samples, **packing), pair.rows.values(), strict=True):
        with torch.no_grad():
            assert worst(found, list(pair.teacher_forced(row))[: len(found)]) < 1e-5


def laid_out(layout: str, samples: list[Any]) -> list[Any]:
    samples = samples[::-1] if layout == "backwards" else samples
    return [packed_batch([sample]) for sample in samples] if layout == "one by one" else [packed_batch(samples)]


@pytest.mark.parametrize("layout", ["one by one", "packed", "padded between rows", "backwards", "recomputed"])
def test_every_gradient(layout: str, pair: Pair) -> None:
    zoo = pair.zoo
    if layout == "recomputed":
        zoo = pair.trained(pair.folder, zoo.world, "engine.recompute=full")
    wanted_loss = pair.loss()
    wanted = pair.gradients(wanted_loss)
    assert {name.partition(".")[0] for name in wanted} == {"talker"}
    batches = laid_out(layout, pair.samples)
    loss, gradients = zoo.gradients(batches, pair.count, **({"align": 4} if "padded" in layout else {}))
    assert loss == pytest.approx(float(wanted_loss), rel=1e-6)
    found = zoo.published({name: grad for name, grad in gradients.items() if name.startswith("talker.")})
    errors = relative_errors(found, wanted)
    assert not {name: error for name, error in errors.items() if not error < 1e-5}
    frozen = [p for name, p in zoo.model.named_parameters() if not name.startswith("talker.")]
    assert frozen and all(p.grad is None for p in frozen), "a thinker that is not trained"


@pytest.mark.parametrize(
    "layout",
    [pytest.param("one by one", marks=pytest.mark.slow), "packed", pytest.param("padded between rows", marks=pytest.mark.slow),
     pytest.param("recomputed", marks=pytest.mark.slow)],
)  # fmt: skip
def test_every_gradient_of_a_thinker_that_learns_to_be_spoken(layout: str, pair: Pair) -> None:
    """Thinker and talker as one network: the text's loss, 0.7 times the first codes' and 0.7 * 0.4 times the residual ones'."""
    more = ["engine.recompute=full"] if layout == "recomputed" else []
    more += ["train.residual_loss=0.4"] if pair.codebooks > 1 else []
    zoo = pair.trained(pair.folder, pair.zoo.world, "train.speech_loss=0.7", *more, joint=True)
    wanted_loss = pair.text_loss() + 0.7 * pair.loss(0.4, joint=True)
    wanted = pair.gradients(wanted_loss)
    assert {name.partition(".")[0] for name in wanted} == {"talker", "thinker"}
    assert {name.split(".")[1] for name in wanted} >= {"model", "visual", "audio_tower"}
    packing = {"align": 4} if "padded" in layout else {}
    loss, gradients = zoo.gradients(laid_out(layout, pair.samples), pair.count, **packing)
    assert loss == pytest.approx(float(wanted_loss), rel=1e-6)
    found = zoo.published({name: grad for name, grad in gradients.items() if grad is not None})
    assert worst_gradient({name: found[name] for name in wanted}, wanted)[0] < 1e-5
    assert not any(float(found[name].abs().max()) for name in found.keys() - wanted.keys())


@OF_FAMILIES
@pytest.mark.parametrize("name", ["talker", pytest.param("speech", marks=pytest.mark.slow)])
def test_adapters_as_peft_has_them(name: str, pair: Pair, tmp_path: Path) -> None:
    """peft loads adapters of the talker's decoders and projections, and of the thinker's where it learns, and has zoo's gradients."""
    import peft

    from zoo.checkpoint import lora_files

    world, joint = pair.zoo.world, name == "speech"
    recipe = recipe_for(
        pair.folder, "lora.rank=3", "lora.alpha=6", "lora.dropout=0", recipe=f"{pair.family}_{name}_sft_lora"
    )
    zoo, adapters = with_adapters(recipe, world)
    folder = lora_files.export_adapters(adapters, tmp_path / "adapter", zoo.assembly, recipe, world, steps=0)
    wrapped = peft.PeftModel.from_pretrained(load_plain(pair.folder), folder, is_trainable=True).eval()
    hf = wrapped.base_model.model
    wanted_loss = pair.loss(joint=joint, hf=hf) + (pair.text_loss(hf) if joint else 0.0)
    wanted_loss.backward()
    wanted = {adapters.renames.former(key): grad for key, grad in peft_gradients(wrapped).items()}
    loss, gradients = zoo.gradients([packed_batch(pair.samples)], pair.count)
    assert loss == pytest.approx(float(wanted_loss), rel=1e-6)
    names = {id(p): name for name, p in zoo.model.named_parameters()}
    found = published_gradients(adapters, gradients, names)
    assert {key.split(".")[2] for key in found} == ({"talker", "thinker"} if joint else {"talker"})
    assert not any("head" in key for key in found)
    assert worst_gradient(found, wanted)[0] < 1e-5


@pytest.mark.parametrize("packing", [{}, {"align": 4}], ids=str)
def test_metrics_of_each_row(packing: dict, pair: Pair) -> None:
    """Metrics of a step and of an evaluation: sums over first codes, frames and rows."""
    step, rows, further = pair.zoo.step(**packing), list(pair.rows.values()), pair.codebooks - 1
    with torch.no_grad():
        output, loss = step(iter([packed_batch(pair.samples)]), pair.zoo.model, loss_scale=1.0, evaluate=True)
        _, metrics = loss(output)
        singles = [pair.losses([row]) for row in rows]
        logits = [pair.teacher_forced(row) for row in rows]
    for number, (row, (first, residual)) in enumerate(zip(rows, singles, strict=True)):
        wanted = float(first + 0.3 * residual / max(1, further))
        assert float(metrics["segment_nll"][number]) == pytest.approx(wanted, rel=1e-5)
        assert float(metrics["segment_weight"][number]) == len(row.frames) + 1
        assert float(metrics["segment_labels"][number]) == row.frames.numel() + 1
        guesses, rest = (x.argmax(-1) for x in logits[number])
        right = int((guesses[:-1] == row.frames[:, 0]).sum() + (rest == row.frames.T[1:]).sum())
        assert int(metrics["segment_correct"][number]) == right + int(guesses[-1] == pair.end)
    totals = {name: float(value) for name, value in metrics.items() if not value.ndim}
    wanted_means = {"code_loss": sum(float(first) for first, _ in singles) / pair.count}
    if further:
        frames = sum(len(row.frames) for row in rows)
        wanted_means["residual_loss"] = sum(float(rest) for _, rest in singles) / (further * frames)
    assert step.speech.means(totals, float(metrics["weight"])) == pytest.approx(wanted_means, rel=1e-5)


def spoken_row(pair: Pair, **keys: Any) -> Any:
    """A row said in nine frames."""
    from zoo.data.sources.references import Access
    from zoo.data.sources.rows import make_row

    messages = [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "1 2"}]
    speech = {"speech": frames(pair, 9), "speaker": "Chelsie", **keys}
    return make_row({"messages": messages, **speech}, "rows:1", Access(Path()))


def frames(pair: Pair, count: int) -> list[list[int]]:
    return [list(range(1, 1 + pair.codebooks))] * count


@OF_FAMILIES
def test_a_row_as_the_loader_has_it(pair: Pair) -> None:
    from zoo.packing.spoken import ANSWERS, COUNTS, FRAMES

    processor = pair.zoo.assembly.processor
    sample = processor.encode(spoken_row(pair), **OPTIONS)
    assert sample.num_labels == sample.label_weight == sample.codes == 10
    assert sample.media[FRAMES].tolist() == frames(pair, 9) and sample.media[COUNTS].tolist() == [9]
    ((first, stop),) = sample.media[ANSWERS].tolist()
    assert processor.tokenizer.decode(sample.input_ids[first:stop]) == "1 2"
    (logits,) = pair.logits([sample])
    assert [len(x) for x in logits] == [10, 3][: len(logits)]
    if pair.codebooks == 1:
        whole = processor.encode(spoken_row(pair, speech=[1] * 9), **OPTIONS)
        assert whole.media[FRAMES].tolist() == frames(pair, 9)


@OF_FAMILIES
def test_a_row_weighs_as_often_as_its_weight_says(pair: Pair) -> None:
    """Its text and its codes: of weight 2 they are worth the row twice."""
    from zoo.data.sample import collate
    from zoo.packing import PackedLayout

    zoo = pair.trained(pair.folder, pair.zoo.world, "train.speech_loss=0.7", joint=True)

    def sums(*weights: float) -> list[float]:
        samples = [zoo.assembly.processor.encode(spoken_row(pair, weight=weight), **OPTIONS) for weight in weights]
        samples.append(pair.samples[1])
        batch = collate(samples, PackedLayout.from_lengths([sample.length for sample in samples]))
        with torch.no_grad():
            output, loss = zoo.step()(iter([batch]), zoo.model, loss_scale=1.0)
            _, metrics = loss(output)
        assert batch.loss_weight == 10 * sum(weights) + samples[-1].label_weight
        return [
            float(metrics[key])
            for key in ("nll", "weight", "text_nll", "code_nll", "residual_nll", "frames")
            if key in metrics
        ]

    assert sums(2.0) == pytest.approx(sums(1.0, 1.0), rel=1e-5)


@OF_FAMILIES
@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"speech": None, "speaker": None}, "can't be learnt: it has none; give it"),
        ({"speech": [[1, 2]] * 9}, "its frames have 2 codes; wanted {codebooks}"),
        ({"speech": "beyond"}, "frame 9 has code 40 of codebook {last}; wanted 0 to 39"),
        ({"speech": "short"}, "it has 2 frames, fewer than the answer has tokens"),
        ({"speaker": "Nobody"}, "speaker Nobody is not in the checkpoint, which has chelsie, ethan"),
        ({"speaker": None}, "it has no speaker; the checkpoint has chelsie, ethan"),
    ],
    ids=str,
)
def test_a_speech_that_does_not_fit_the_talker_is_refused(keys: dict, reason: str, pair: Pair) -> None:
    from zoo.data.errors import RowError

    beyond = [*frames(pair, 9), [0] * (pair.codebooks - 1) + [40]]
    named = {"beyond": beyond, "short": frames(pair, 2)}
    keys = {key: named.get(value, value) if isinstance(value, str) else value for key, value in keys.items()}
    reason = reason.format(codebooks=pair.codebooks, last=pair.codebooks - 1)
    with pytest.raises(RowError, match=f"rows:1: .*{reason}"):
        pair.zoo.assembly.processor.encode(spoken_row(pair, **keys), **OPTIONS)


def test_a_checkpoint_without_a_talker_is_refused(tiny_omni: Any, cpu_world: Any) -> None:
    from zoo.errors import UserError

    assembly = Zoo.load(tiny_omni.whole, cpu_world).assembly
    for call in (assembly.processor.train_speech, assembly.config.checked_talker):
        with pytest.raises(UserError, match="the model has no talker"):
            call()


@OF_FAMILIES
def test_a_thinker_is_trained_as_before_and_carries_the_talker(pair: Pair, tmp_path: Path, cpu_world: Any) -> None:
    """Without the loss of speech no talker is built, and an export has it byte for byte."""
    thinker = pair.trained(pair.folder, cpu_world, joint=True)
    assert not hasattr(thinker.model, "talker")
    same(tensors(export(thinker, tmp_path / "export", pair.folder)), tensors(pair.folder))
    same(tensors(export(pair.zoo, tmp_path / "whole", pair.folder)), tensors(pair.folder))
    for carried in pair.folder.glob("*.pt"):
        for folder in ("export", "whole"):
            assert (tmp_path / folder / carried.name).read_bytes() == carried.read_bytes()
