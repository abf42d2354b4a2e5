import json
import threading
from dataclasses import replace

import pytest
import torch

from zoo.config.schema import DataConfig, PackingConfig, Recipe, TrainConfig
from zoo.data.loading.bad_rows import BadRows
from zoo.data.loading.evaluation import eval_batches
from zoo.data.loading.lengths import Lengths
from zoo.data.loading.loader import BatchLoader
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.sizes import SampleSize
from zoo.data.sample import IGNORE, Sample, collate, collate_padded
from zoo.data.sources.rows import Row, RowError
from zoo.errors import ConfigError, UserError
from zoo.packing import PackedLayout

MEDIA_ID = 7


class FakeProcessor:
    """A row's text names its samples: "id length", with media tokens up to `media` and labels from there on."""

    pad_id = 9
    modalities = ("text", "image")
    media_ids = frozenset({MEDIA_ID})

    def __init__(self) -> None:
        self.calls = 0
        self.encoded: list[str] = []

    def measure(self, row: Row, **how: object) -> SampleSize | None:
        return None

    def size(self, sample: Sample) -> SampleSize:
        return SampleSize(sample.length)

    def encode(self, row: Row, **options: object) -> Sample:
        self.calls += 1
        self.encoded.append(row.source)
        number, length, media = map(int, row.messages[0][1].split())
        if length == 0:
            raise RowError(row.source, "corrupt_media", "broken.")
        input_ids = torch.full((length,), 100 + number)
        input_ids[:media] = MEDIA_ID
        labels = torch.where(torch.arange(length) < max(media, 1), IGNORE, input_ids)
        pixels = torch.full((media, 2), float(number))
        return Sample(input_ids, labels, {"pixels": pixels} if media else {}, "fake", row.source)


def make_rows(lengths: list[int], media: int = 1) -> list[Row]:
    texts = [f"{number} {length} {media}" for number, length in enumerate(lengths)]
    return [Row((("user", text),), source=f"x:{line}") for line, text in enumerate(texts, start=1)]


def lengths_of(source: SampleSource) -> list[int | None]:
    lengths = Lengths(source)
    lengths.ahead(range(len(source)))
    sizes = [lengths.get(index) for index in range(len(source))]
    return [size and size[0] for size in sizes]


LENGTHS = [3 + (7 * i) % 29 for i in range(50)]


def make_source(lengths=LENGTHS, media=1, budget=64, align=1, bad_rows=None, **data) -> SampleSource:
    config = DataConfig(**data)
    bad = BadRows(config, bad_rows)
    rows, processor = make_rows(lengths, media), FakeProcessor()
    return SampleSource.of_rows(rows, processor, config, budget=budget, align=align, bad_rows=bad)


def recipe(mode="thd", global_batch=4, micro_batch=1, budget=64, pad_to=None, **data) -> Recipe:
    return Recipe(
        packing=PackingConfig(mode=mode, budget=budget, pad_to=pad_to),
        train=TrainConfig(global_batch=global_batch, micro_batch=micro_batch),
        data=DataConfig(lookahead=16, **data),
    )


def make_loader(source=None, config=None, **options) -> BatchLoader:
    return BatchLoader(source or make_source(), config or recipe(), **options)


def stream(loader: BatchLoader, steps: int) -> list:
    return [[batch.sources for batch in loader.next_step()] for _ in range(steps)]


def test_the_first_step_is_prepared_once_it_is_begun() -> None:
    """It is the same step as without `begin`, and a state that is loaded afterwards still takes effect."""
    begun, plain = make_loader(), make_loader()
    assert not begun.begun
    begun.begin()
    assert begun.begun and begun._ahead is not None
    begun._ahead.result(timeout=20)
    begun.begin()  # a second time: nothing
    assert stream(begun, 3) == stream(plain, 3)
    state, following = plain.state_dict(), stream(plain, 1)
    again = make_loader()
    again.begin()
    again.load_state_dict(state)
    assert not again.begun
    again.begin()
    assert stream(again, 1) == following
    for loader in (begun, plain, again):
        loader.close()


def test_a_run_that_has_failed_does_not_wait_for_its_rows() -> None:
    source, asked = make_source(), []
    reached, goes_on = threading.Event(), threading.Event()

    def tick() -> None:
        asked.append(1)
        reached.set()
        goes_on.wait(20)

    source._tick = tick
    loader = make_loader(source)
    loader.begin()
    assert reached.wait(20)
    source.abandon()
    goes_on.set()
    assert loader._ahead is not None
    with pytest.raises(RuntimeError, match="the run has ended"):
        loader._ahead.result(timeout=20)
    assert len(asked) == 1
    loader.close()


# ---------------------------------------------------------------- collate


def test_packed_batch_has_each_sample_in_its_segment():
    source = make_source([5, 3, 6], media=2)
    samples = [source.sample(index) for index in range(3)]
    layout = PackedLayout.from_lengths([5, 3, 6], align=4)
    batch = collate(samples, layout, pad_id=9)
    assert batch.input_ids.shape == batch.labels.shape == (1, 20)
    assert (batch.input_ids[layout.padding_mask] == 9).all()
    assert (batch.labels[layout.padding_mask] == IGNORE).all()
    torch.testing.assert_close(batch.input_ids[0, 8:11], samples[1].input_ids, rtol=0, atol=0)
    assert batch.media["pixels"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert (batch.lengths, batch.real_tokens, batch.total) == ((5, 3, 6), 14, 20)
    assert (batch.attention_mask, batch.layout) == (None, layout)
    assert (batch.kinds, batch.sources) == (("fake",) * 3, ("x:1", "x:2", "x:3"))
    assert batch.num_labels == 3 + 1 + 4


def test_padded_batch():
    source = make_source([5, 3], media=0)
    batch = collate_padded([source.sample(0), source.sample(1)], align=4, pad_id=9).pin().to("cpu")
    assert batch.input_ids.shape == (2, 8) and batch.attention_mask.sum(1).tolist() == [5, 3]
    assert (batch.input_ids[~batch.attention_mask] == 9).all()
    assert (batch.labels[~batch.attention_mask] == IGNORE).all()
    torch.testing.assert_close(batch.labels[1, :3], source.sample(1).labels, rtol=0, atol=0)
    assert (batch.media, batch.layout) == ({}, None)
    assert collate_padded([source.sample(0)], align=4, pad_to=12).input_ids.shape == (1, 12)
    with pytest.raises(ValueError, match="pad_to is 4"):
        collate_padded([source.sample(0)], pad_to=4)


def test_the_first_token_is_no_target():
    sample = Sample(torch.arange(3), torch.arange(3))
    assert (sample.length, sample.num_labels, sample.nbytes) == (3, 2, 48)


# ---------------------------------------------------------------- source


def test_samples_are_encoded_once_and_the_cache_is_bounded():
    source = make_source([5, 6])
    assert [*lengths_of(source), source.sample(0).length] == [5, 6, 5]
    assert source.processor.calls == 2
    small = make_source([5, 6], cache_mb=0)
    assert [*lengths_of(small), small.sample(0).length] == [5, 6, 5]
    assert small.processor.calls == 3


def test_least_recently_used_sample_goes_first():
    source = make_source([20_000] * 4, media=0, budget=20_000, cache_mb=1)  # 320 kB each: three fit
    for index in (0, 1, 2, 0, 3):
        source.sample(index)
    assert source.processor.calls == 4
    source.sample(0)
    assert source.processor.calls == 4
    source.sample(1)
    assert source.processor.calls == 5


def test_a_bad_row_is_skipped_counted_and_listed_once(tmp_path):
    for _ in range(2):  # the second source is a resumed run's
        source = make_source([5, 0, 4], bad_rows=tmp_path / "run" / "bad_rows.jsonl", on_error="skip")
        assert lengths_of(source) == [5, None, 4]
        assert source.sample(1) is source.sample(4) is None
        assert source.counts == {"corrupt_media": 1}
    listed = [json.loads(line) for line in (tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines()]
    assert listed == [{"source": "x:2", "cause": "corrupt_media", "message": "broken."}]


def test_a_list_of_bad_rows_that_was_cut_off_is_continued(tmp_path):
    path = tmp_path / "bad_rows.jsonl"
    path.write_text('{"source": "x:9", "cause": "a", "message": "b"}\n{"source": "x:')
    assert make_source([5, 0, 4], bad_rows=path, on_error="skip").sample(1) is None
    first, half, last = path.read_text().splitlines()
    assert half == '{"source": "x:' and json.loads(last)["source"] == "x:2" and json.loads(first)


def test_overlong_error_names_the_limit_and_the_ways_out():
    with pytest.raises(RowError, match=r"10 tokens \(3 of media\) are over packing\.budget 8; raise") as caught:
        make_source([10], media=3, budget=8).sample(0)
    assert caught.value.cause == "overlong"
    with pytest.raises(RowError, match=r"over packing.budget 10 \(8 aligned\)"):
        make_source([10], budget=10, align=4).sample(0)


def test_overlong_drop_counts_even_where_errors_raise(tmp_path):
    source = make_source([10, 8], budget=8, overlong="drop", bad_rows=tmp_path / "bad.jsonl")
    assert lengths_of(source) == [None, 8]
    assert source.counts == {"overlong": 1}
    assert json.loads((tmp_path / "bad.jsonl").read_text())["source"] == "x:1"


@pytest.mark.parametrize("media", [0, 3, 7])
def test_truncate_text_cuts_behind_the_media(media):
    source = make_source([10], media=media, budget=8, overlong="truncate_text")
    whole = FakeProcessor().encode(source.rows[0], video_fps=2, max_frames=2)
    sample = source.sample(0)
    torch.testing.assert_close(sample.input_ids, whole.input_ids[:8], rtol=0, atol=0)
    torch.testing.assert_close(sample.labels, whole.labels[:8], rtol=0, atol=0)
    assert sample.num_labels > 0


@pytest.mark.parametrize(("media", "words"), [(8, "no answer would be left"), (9, "media stand behind")])
def test_truncate_text_refuses_to_cut_media_or_the_last_label(media, words):
    with pytest.raises(RowError, match=words):
        make_source([10], media=media, budget=8, overlong="truncate_text").sample(0)


def test_open_reads_files_and_skips_their_bad_rows(media, processor, make, tmp_path):
    good = {"messages": [("user", "hi"), ("assistant", "ho")]}
    path = make.rows(tmp_path / "x.jsonl", [good, {**good, "image": "gone.png"}, good])
    config = DataConfig(on_error="skip")
    source = SampleSource.open([str(path), str(path)], processor, config, budget=64, bad_rows=tmp_path / "bad")
    assert len(source) == 4
    assert source.counts == {"placeholder_mismatch": 2}
    assert source.sample(3).source == f"{path}:3"
    assert len(SampleSource.open([str(path)], processor, config, budget=64, max_rows=1)) == 1
    with pytest.raises(RowError, match="0 <image> in the messages"):
        SampleSource.open([str(path)], processor, DataConfig(), budget=64)
    (tmp_path / "y.jsonl").write_text("{\n")
    with pytest.raises(UserError, match="no usable row"):
        SampleSource.open([str(tmp_path / "y.jsonl")], processor, config, budget=64)


# ---------------------------------------------------------------- loader


@pytest.mark.parametrize("mode", ["thd", "none"])
@pytest.mark.parametrize("prefetch", [True, False])
def test_the_stream_is_deterministic(mode, prefetch):
    config = recipe(mode, micro_batch=2)
    one = stream(make_loader(config=config, prefetch=prefetch), 10)
    assert one == stream(make_loader(config=config), 10)
    other = replace(config, run=replace(config.run, seed=7))
    assert one != stream(make_loader(config=other), 10)


def test_rows_keep_their_order_without_shuffle():
    loader = make_loader(config=recipe("none", shuffle=False))
    assert stream(loader, 1) == [[("x:1",), ("x:2",), ("x:3",), ("x:4",)]]


@pytest.mark.parametrize("align", [1, 8])
def test_bins_keep_to_the_budget_and_fill_it(align):
    loader = make_loader(make_source(align=align), recipe(), align=align)
    batches = [batch for _ in range(10) for batch in loader.next_step()]
    assert all(batch.total <= 64 and batch.total % align == 0 for batch in batches)
    assert sum(batch.total for batch in batches) > 0.9 * 64 * len(batches)


def test_pad_to_gives_static_shapes():
    loader = make_loader(config=recipe(pad_to=80), align=8)
    assert {batch.input_ids.shape for batch in loader.next_step()} == {(1, 80)}
    with pytest.raises(ConfigError, match=r"pad_to is 32, under packing\.budget 64"):
        make_loader(config=recipe(pad_to=32))


def test_none_mode_pads_to_the_alignment():
    loader = make_loader(config=recipe("none", micro_batch=2), align=8)
    for batch in loader.next_step():
        assert batch.input_ids.shape[0] == 2
        assert batch.input_ids.shape[1] % 8 == 0
        assert batch.attention_mask.sum(1).tolist() == list(batch.lengths)


@pytest.mark.parametrize("mode", ["thd", "none"])
@pytest.mark.parametrize("stop", [0, 1, 7, 13])
def test_a_resumed_stream_is_the_uninterrupted_one(mode, stop):
    config = recipe(mode, micro_batch=2)
    whole = stream(make_loader(config=config), 20)
    first = make_loader(config=config, dp_rank=0, dp_size=1)
    head = stream(first, stop)
    state = json.loads(json.dumps(first.state_dict()))
    second = make_loader(config=config)
    stream(second, 3)  # a loader that has already run forgets what it did
    second.load_state_dict(state)
    assert second.step == stop
    assert head + stream(second, 20 - stop) == whole


def test_resume_with_other_data_is_refused():
    state = make_loader().state_dict()
    with pytest.raises(ConfigError, match=r"had 50 rows and run\.seed 1234; now there are 49"):
        make_loader(make_source(LENGTHS[:-1])).load_state_dict(state)


@pytest.mark.parametrize("mode", ["thd", "none"])
def test_rows_that_were_added_join_in_the_next_epoch(mode: str) -> None:
    """Twice in an epoch, which ends with each of its own rows once; bins, sizes and the order stay those of the run."""

    def loaded(extra: int, state: dict | None = None, size: int | None = None) -> BatchLoader:
        loader = make_loader(make_source(LENGTHS + [9] * extra), config=recipe(mode, micro_batch=2))
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)), None if size is None else [size])
        return loader

    def names(steps: list) -> list[str]:
        return [name for step in steps for batch in step for name in batch]

    undisturbed = names(stream(loaded(0), 20))[:50]
    first = loaded(0)
    found = names(stream(first, 1))
    second = loaded(3, first.state_dict(), 50)
    found += names(stream(second, 1))
    third = loaded(10, second.state_dict(), 53)
    found += names(stream(third, 1))
    fourth = loaded(10, third.state_dict())  # the same data: an ordinary resume
    found += names(stream(fourth, 60))
    if mode == "none":  # in order; the look-ahead of packed rows runs on over the epoch's end
        assert found[:50] == undisturbed
        assert sorted(found[50:110]) == sorted(f"x:{line}" for line in range(1, 61))
    assert {f"x:{line}" for line in range(1, 51)} <= set(found[:80]) and set(found[:150]) == {
        f"x:{line}" for line in range(1, 61)
    }


def test_a_bad_row_in_the_thread_reaches_the_caller():
    loader = make_loader(make_source([5] * 40 + [0]), recipe("none", shuffle=False, global_batch=8))
    with pytest.raises(RowError, match="x:41"):
        stream(loader, 10)


@pytest.mark.parametrize("mode", ["thd", "none"])
def test_ranks_that_do_not_divide_the_batch_share_its_bins_and_fill_up(mode: str) -> None:
    """Three of four bins: two of each rank, of which two count nothing."""
    config = recipe(mode, global_batch=8 if mode == "none" else 4, micro_batch=2)
    alone = make_loader(config=config)
    loaders = [make_loader(config=config, dp_rank=rank, dp_size=3) for rank in range(3)]
    for _ in range(5):
        wanted = [batch.sources for batch in alone.next_step()]
        steps = [loader.next_step() for loader in loaders]
        assert [len(batches) for batches in steps] == [2, 2, 2]
        counted = [batch for batches in steps for batch in batches if not batch.filler]
        assert sorted(batch.sources for batch in counted) == sorted(wanted) and len(counted) == 4
        assert all(not batch.sources for batches in steps for batch in batches if batch.filler)


def test_an_epoch_of_less_than_a_step_is_one():
    assert make_loader(config=recipe(global_batch=1000)).steps_for_epochs(0.1) == 1


# ---------------------------------------------------------------- evaluation


@pytest.mark.parametrize("mode", ["thd", "none"])
@pytest.mark.parametrize("dp", [1, 3])
def test_evaluation_sees_every_row_once(mode, dp):
    lengths = [0 if i == 4 else length for i, length in enumerate(LENGTHS)]
    seen, counts = [], set()
    for rank in range(dp):
        source = make_source(lengths, on_error="skip")
        batches = eval_batches(source, mode=mode, budget=64, micro_batch=4, dp_rank=rank, dp_size=dp)
        listed = list(batches)
        assert len(listed) == len(batches)
        assert None not in listed[:-1]
        counts.add(len(listed))
        seen += [name for batch in listed if batch is not None for name in batch.sources]
    assert sorted(seen) == sorted(f"x:{i + 1}" for i in range(50) if i != 4)
    assert len(counts) == 1


def test_evaluation_on_more_ranks_than_bins_gives_none():
    source = make_source([5, 5])
    assert list(eval_batches(source, budget=64, dp_rank=1, dp_size=2)) == [None]


def test_real_rows_through_the_whole_way(processor):
    config = recipe(budget=512, global_batch=2)
    source = SampleSource.open(["digits:heldout"], processor, config.data, budget=512)
    loader = BatchLoader(source, config, align=2)
    batch = loader.next_step()[0]
    assert batch.total <= 512
    assert batch.num_labels > 0
    image = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    patches = batch.media["image_grid_thw"].prod(-1).sum()
    assert int((batch.input_ids == image).sum()) == int(patches) // 4
