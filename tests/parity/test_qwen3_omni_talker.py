"""Qwen3-Omni's talker reads, predicts and learns what transformers' does, which says the rows itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.adapted import with_adapters
from support.adapters import peft_gradients, published_gradients
from support.engine import Zoo, packed_batch, recipe_for
from support.gathered import worst as worst_gradient
from support.pairs import relative_errors, worst
from support.rows import make_examples
from support.spoken import Spoken, losses, say, teacher_forced, text_loss
from support.tiny_talker import CODES, VOCABULARY, whole_config, write_tiny_talker
from support.weights import export, same, tensors

TALKS = ("train.speech_loss=1", "model.freeze=[vision,audio,language]")
# transformers' talker can't place sound beside pictures: its config has no audio_config.
ROWS = ("text-short", "text-long", "image-short", "multi_image-long", "video-long", "audio-long", "turns")


@dataclass(frozen=True)
class Pair:
    folder: Path
    hf: Any
    zoo: Zoo
    rows: dict[str, Spoken]

    @property
    def samples(self) -> list[Any]:
        return [row.sample for row in self.rows.values()]

    @property
    def end(self) -> int:
        return int(self.hf.config.talker_config.codec_eos_token_id)

    def logits(self, samples: list[Any], **packing: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """zoo's logits of first codes and ends, and of residual codes, of each sample of a packed row."""
        step, model = self.zoo.step(**packing), self.zoo.model
        inputs, _ = step.prepare(packed_batch(samples), evaluate=True)
        speech, noted = inputs.speech, model.noted_states()
        with torch.no_grad():
            first, residual = model.talker.logits(*model.read(inputs, speech, noted), speech, speech.label_rows)
        counts = [len(sample.media["speech_codes"]) for sample in samples]
        firsts = first.split([count + 1 for count in counts])
        return list(zip(firsts, residual.split(counts, dim=1), strict=True))


@pytest.fixture(scope="module", params=[0, 3, 5], ids="layer {}".format)
def pair(request: Any, tmp_path_factory: Any, cpu_world: Any) -> Iterator[Pair]:
    """`accept_hidden_layer` 0, one behind which deepstack features are added, and the last one."""
    folder = write_tiny_talker(tmp_path_factory.mktemp("talker"), accept_hidden_layer=request.param)
    hf, zoo = tiny.load_plain(folder), Zoo.load(folder, cpu_world, *TALKS)
    examples = make_examples(tiny.processor("qwen3_omni", hf.config))  # of rows that are not spoken yet
    rows = {name: say(hf, zoo, examples[name], number, words=1 + 2 * number) for number, name in enumerate(ROWS)}
    return Pair(folder, hf, zoo, rows)


@pytest.mark.parametrize("name", ROWS)
def test_the_row_that_transformers_said(name: str, pair: Pair) -> None:
    """All that its generation predicted, code by code, is what zoo predicts of the whole row at once."""
    row = pair.rows[name]
    ((first, residual),) = pair.logits([row.sample])
    assert worst([first], [torch.stack(row.heard.logits)]) < 1e-5
    wanted = torch.stack(row.heard.residual).unflatten(0, residual.shape[1::-1]).transpose(0, 1)
    assert worst([residual], [wanted]) < 1e-5


@pytest.mark.parametrize("packing", [{}, {"align": 4}], ids=str)
def test_packed_rows(packing: dict, pair: Pair) -> None:
    found = pair.logits(pair.samples, **packing)
    for logits, row in zip(found, pair.rows.values(), strict=True):
        with torch.no_grad():
            assert worst(list(logits), list(teacher_forced(pair.hf, row))) < 1e-5


@pytest.mark.parametrize("layout", ["one by one", "packed", "padded between rows", "backwards", "recomputed"])
def test_every_gradient(layout: str, pair: Pair) -> None:
    """Gradients of the loss that zoo trains: first codes and ends, and 0.3 times the mean of each frame's residual codes."""
    rows, zoo = list(pair.rows.values()), pair.zoo
    if layout == "recomputed":
        zoo = Zoo.load(pair.folder, zoo.world, *TALKS, "engine.recompute=full")
    first, residual = losses(pair.hf, rows)
    count = sum(len(row.frames) + 1 for row in rows)
    wanted_loss = (first + 0.3 * residual / 3) / count
    pair.hf.zero_grad(set_to_none=True)
    wanted_loss.backward()
    wanted = {name: p.grad for name, p in pair.hf.named_parameters() if p.grad is not None}
    wanted = tiny.experts_apart(wanted)
    assert {name.partition(".")[0] for name in wanted} == {"talker"}
    batches = laid_out(layout, pair.samples)
    frozen = [p for name, p in zoo.model.named_parameters() if not name.startswith("talker.")]
    loss, gradients = zoo.gradients(batches, count, **({"align": 4} if "padded" in layout else {}))
    assert loss == pytest.approx(float(wanted_loss), rel=1e-6)
    found = zoo.published({name: grad for name, grad in gradients.items() if name.startswith("talker.")})
    errors = relative_errors(found, wanted)
    assert not {name: error for name, error in errors.items() if not error < 1e-5}
    assert all(p.grad is None for p in frozen), "a thinker that is not trained"


def laid_out(layout: str, samples: list[Any]) -> list[Any]:
    samples = samples[::-1] if layout == "backwards" else samples
    return [packed_batch([sample]) for sample in samples] if layout == "one by one" else [packed_batch(samples)]


@pytest.mark.parametrize(
    "layout",
    [pytest.param("one by one", marks=pytest.mark.slow), "packed", pytest.param("padded between rows", marks=pytest.mark.slow),
     pytest.param("recomputed", marks=pytest.mark.slow)],
)  # fmt: skip
def test_every_gradient_of_a_thinker_that_learns_to_be_spoken(layout: str, pair: Pair) -> None:
    """Thinker and talker as one network: the text's loss, 0.7 times the first codes' and 0.7 * 0.4 times the residual ones'."""
    more = ["engine.recompute=full"] if layout == "recomputed" else []
    zoo = Zoo.load(pair.folder, pair.zoo.world, "train.speech_loss=0.7", "train.residual_loss=0.4", *more)
    rows = list(pair.rows.values())
    count = sum(len(row.frames) + 1 for row in rows)
    (first, residual), texts = losses(pair.hf, rows, joint=True), text_loss(pair.hf, rows)
    wanted_loss = (texts + 0.7 * (first + 0.4 * residual / 3)) / count
    pair.hf.zero_grad(set_to_none=True)
    wanted_loss.backward()
    wanted = tiny.experts_apart({name: p.grad for name, p in pair.hf.named_parameters() if p.grad is not None})
    assert {name.partition(".")[0] for name in wanted} == {"talker", "thinker"}
    packing = {"align": 4} if "padded" in layout else {}
    loss, gradients = zoo.gradients(laid_out(layout, pair.samples), count, **packing)
    assert loss == pytest.approx(float(wanted_loss), rel=1e-6)
    found = zoo.published(gradients)
    assert worst_gradient({name: found[name] for name in wanted}, wanted)[0] < 1e-5
    assert not any(float(found[name].abs().max()) for name in found.keys() - wanted.keys())


@pytest.mark.parametrize("name", ["talker", pytest.param("speech", marks=pytest.mark.slow)])
def test_adapters_as_peft_has_them(name: str, pair: Pair, tmp_path: Path) -> None:
    """peft loads adapters of the talker's decoders and projections, and of the thinker's where it learns, and has zoo's gradients."""
    import peft

    from zoo.checkpoint import lora_files

    if pair.hf.config.talker_config.accept_hidden_layer != 3:
        pytest.skip("which layer's states the talker reads changes no adapter; layer 3 shows them")
    world, joint = pair.zoo.world, name == "speech"
    recipe = recipe_for(pair.folder, "lora.rank=3", "lora.dropout=0", recipe=f"qwen3_omni_{name}_sft_lora")
    zoo, adapters = with_adapters(recipe, world)
    folder = lora_files.export_adapters(adapters, tmp_path / "adapter", zoo.assembly, recipe, world, steps=0)
    wrapped = peft.PeftModel.from_pretrained(tiny.load_plain(pair.folder), folder, is_trainable=True).eval()
    hf, rows = wrapped.base_model.model, list(pair.rows.values())
    count = sum(len(row.frames) + 1 for row in rows)
    first, residual = losses(hf, rows, joint=joint)
    wanted_loss = (first + 0.3 * residual / 3 + (text_loss(hf, rows) if joint else 0.0)) / count
    wanted_loss.backward()
    wanted = {adapters.renames.former(key): grad for key, grad in peft_gradients(wrapped).items()}
    loss, gradients = zoo.gradients([packed_batch(pair.samples)], count)
    assert loss == pytest.approx(float(wanted_loss), rel=1e-6)
    names = {id(p): name for name, p in zoo.model.named_parameters()}
    found = published_gradients(adapters, gradients, names)
    assert {key.split(".")[2] for key in found} == ({"talker", "thinker"} if joint else {"talker"})
    assert not any("head" in key for key in found)
    assert worst_gradient(found, wanted)[0] < 1e-5


@pytest.mark.parametrize("packing", [{}, {"align": 4}], ids=str)
def test_metrics_of_each_row(packing: dict, pair: Pair) -> None:
    """Metrics of a step and of an evaluation: sums over first codes, frames and rows."""
    step, rows = pair.zoo.step(**packing), list(pair.rows.values())
    with torch.no_grad():
        output, loss = step(iter([packed_batch(pair.samples)]), pair.zoo.model, loss_scale=1.0, evaluate=True)
        _, metrics = loss(output)
        singles = [losses(pair.hf, [row]) for row in rows]
        logits = [teacher_forced(pair.hf, row) for row in rows]
    for number, (row, (first, residual)) in enumerate(zip(rows, singles, strict=True)):
        assert float(metrics["segment_nll"][number]) == pytest.approx(float(first + 0.1 * residual), rel=1e-5)
        assert float(metrics["segment_weight"][number]) == len(row.frames) + 1
        assert float(metrics["segment_labels"][number]) == row.frames.numel() + 1
        guesses, rest = (x.argmax(-1) for x in logits[number])
        right = int((guesses[:-1] == row.frames[:, 0]).sum() + (rest == row.frames.T[1:]).sum())
        assert int(metrics["segment_correct"][number]) == right + int(guesses[-1] == pair.end)
    means = step.speech.means(
        {name: float(value) for name, value in metrics.items() if not value.ndim}, float(metrics["weight"])
    )
    frames = sum(len(row.frames) for row in rows)
    assert means["code_loss"] == pytest.approx(
        sum(float(first) for first, _ in singles) / (frames + len(rows)), rel=1e-5
    )
    assert means["residual_loss"] == pytest.approx(sum(float(rest) for _, rest in singles) / (3 * frames), rel=1e-5)


def spoken_row(**keys: Any) -> Any:
    from zoo.data.sources.references import Access
    from zoo.data.sources.rows import make_row

    messages = [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "1 2"}]
    speech = {"speech": [[1, 2, 3, 4]] * 9, "speaker": "Chelsie", **keys}
    return make_row({"messages": messages, **speech}, "rows:1", Access(Path()))


OPTIONS: dict[str, Any] = {"video_fps": 2.0, "max_frames": 8}


def test_a_row_as_the_loader_has_it(pair: Pair) -> None:
    from zoo.packing.spoken import COUNTS, FRAMES, SPEAKERS

    sample = pair.zoo.assembly.processor.encode(spoken_row(), **OPTIONS)
    assert sample.num_labels == sample.label_weight == sample.codes == 10
    assert sample.media[FRAMES].tolist() == [[1, 2, 3, 4]] * 9 and sample.media[COUNTS].tolist() == [9]
    assert sample.media[SPEAKERS].tolist() == [pair.hf.config.talker_config.speaker_id["chelsie"]]
    ((first, residual),) = pair.logits([sample])
    assert first.shape == (10, VOCABULARY) and residual.shape == (3, 9, CODES)


def test_a_row_weighs_as_often_as_its_weight_says(pair: Pair) -> None:
    """Its text and its codes: of weight 2 they are worth the row twice."""
    from zoo.data.sample import collate
    from zoo.packing import PackedLayout

    zoo = Zoo.load(pair.folder, pair.zoo.world, "train.speech_loss=0.7")

    def sums(*weights: float) -> list[float]:
        samples = [zoo.assembly.processor.encode(spoken_row(weight=weight), **OPTIONS) for weight in weights]
        samples.append(pair.samples[1])
        batch = collate(samples, PackedLayout.from_lengths([sample.length for sample in samples]))
        with torch.no_grad():
            output, loss = zoo.step()(iter([batch]), zoo.model, loss_scale=1.0)
            _, metrics = loss(output)
        assert batch.loss_weight == 10 * sum(weights) + samples[-1].label_weight
        return [float(metrics[key]) for key in ("nll", "weight", "text_nll", "code_nll", "residual_nll", "frames")]

    assert sums(2.0) == pytest.approx(sums(1.0, 1.0), rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"speech": None, "speaker": None}, "can't be learnt: it has none; give it"),
        ({"speech": [[1, 2]] * 9}, "its frames have 2 codes; wanted 4"),
        (
            {"speech": [[0, 0, 0, 0], [0, 0, CODES, 0]] * 5},
            f"frame 1 has code {CODES} of codebook 2; wanted 0 to {CODES - 1}",
        ),
        ({"speech": [[1, 2, 3, 4]] * 2}, "it has 2 frames, fewer than the answer has tokens"),
        ({"speaker": "Nobody"}, "speaker Nobody is not in the checkpoint, which has chelsie, ethan"),
        ({"speaker": None}, "it has no speaker; the checkpoint has chelsie, ethan"),
    ],
    ids=str,
)
def test_a_speech_that_does_not_fit_the_talker_is_refused(keys: dict, reason: str, pair: Pair) -> None:
    from zoo.data.errors import RowError

    with pytest.raises(RowError, match=f"rows:1: .*{reason}"):
        pair.zoo.assembly.processor.encode(spoken_row(**keys), **OPTIONS)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model.freeze=[vision,audio,language,talker]"], "nothing would be left to train"),
        (["train.speech_loss=0"], "nothing would be left to train"),
        (["parallel.pp=2"], "parallel.pp=2 with train.speech_loss: a talker is no stage"),
        (["packing.mode=none"], "packing.mode=none with train.speech_loss=1"),
    ],
    ids=str,
)
def test_what_a_talker_is_not_built_for_is_refused(overrides: list[str], reason: str, tmp_path: Path) -> None:
    from zoo.errors import ConfigError

    with pytest.raises(ConfigError, match=reason):
        recipe_for(tmp_path, *TALKS, *overrides, ranks=2)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"tp": 2, "sp": True}, "tp=2 does not divide the 6 attention heads and 3 key-value heads of the talker's code predictor"),
        ({"ep": 4}, "ep=4 does not divide the talker's experts, 6; 1, 2, 3 or 6 would"),
    ],
    ids=str,
)  # fmt: skip
def test_ranks_that_cannot_share_a_talker_are_refused(keys: dict, reason: str) -> None:
    from zoo.config.checks.layout import check_layout
    from zoo.config.schema import Recipe
    from zoo.errors import ConfigError

    arch = whole_config(num_experts=8).to_dict()
    recipe = Recipe().replace({"model.family": "qwen3_omni", "model.arch": arch, "train.speech_loss": 1.0})
    with pytest.raises(ConfigError, match=reason):
        check_layout(recipe.replace({f"parallel.{key}": value for key, value in keys.items()}), 4)


def test_a_family_without_a_talker_is_refused() -> None:
    from zoo.config.checks.training import check_speech
    from zoo.config.schema import Recipe
    from zoo.errors import ConfigError

    with pytest.raises(ConfigError, match="Qwen3-VL has no talker that is trained here"):
        check_speech(Recipe().replace({"model.family": "qwen3_vl", "train.speech_loss": 1.0}))


def test_a_checkpoint_without_a_talker_is_refused(tiny_omni: Any, cpu_world: Any) -> None:
    from zoo.errors import UserError

    assembly = Zoo.load(tiny_omni.whole, cpu_world).assembly
    for call in (assembly.processor.train_speech, assembly.config.checked_talker):
        with pytest.raises(UserError, match="the model has no talker"):
            call()


def test_a_thinker_is_trained_as_before_and_carries_the_talker(pair: Pair, tmp_path: Path, cpu_world: Any) -> None:
    """Without the loss of speech no talker is built, and an export has it byte for byte."""
    thinker = Zoo.load(pair.folder, cpu_world)
    assert not hasattr(thinker.model, "talker")
    same(tensors(export(thinker, tmp_path / "export", pair.folder)), tensors(pair.folder))
    same(tensors(export(pair.zoo, tmp_path / "whole", pair.folder)), tensors(pair.folder))
