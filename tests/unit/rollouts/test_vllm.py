"""What goes to vLLM and what comes back, as its versions 0.26 and 0.32 have it; who answers which prompt."""

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.data.media.media_files import LoadedMedia
from zoo.data.media.sampling import Pace
from zoo.data.sources.references import Access
from zoo.data.sources.rows import Row, make_row, read_rows
from zoo.errors import ConfigError, UserError
from zoo.generation.prompts import make_prompt
from zoo.model.build import assemble
from zoo.rollouts.engine import RolloutPrompt
from zoo.rollouts.vllm import options, requests
from zoo.rollouts.vllm.engine import VllmEngine, seed_of
from zoo.rollouts.vllm.sharing import plan

PAD, BEGIN, END = 373, 370, 371  # of the bundled tokenizer: a placeholder, and the tokens around it
ANSWER = {"role": "assistant", "content": "One."}
TINY = ["size=tiny", "hardware=cpu", "engine.threads=1"]


def completion(tokens: list[int], experts: Any = None) -> SimpleNamespace:
    """A CompletionOutput with `logprobs=0`: by step a mapping with the drawn token alone."""
    logprobs = [{token: SimpleNamespace(logprob=-0.5 * (n + 1), rank=1)} for n, token in enumerate(tokens)]
    return SimpleNamespace(token_ids=tokens, logprobs=logprobs, routed_experts=experts, finish_reason="stop")


def two_images() -> Row:
    images = [Image.fromarray(np.full((64, 96, 3), shade, np.uint8)) for shade in (10, 200)]
    messages = [{"role": "user", "content": "<image> or <image>?"}, ANSWER]
    return make_row({"messages": messages, "images": images}, "rows:1", Access(Path(), outside=True))


def test_a_prompt_has_one_placeholder_for_each_medium() -> None:
    recipe = load_recipe("qwen3_vl_sft", TINY)
    processor, row = assemble(recipe).processor, two_images()
    ids = make_prompt(processor, row, recipe.data, most=8192).sample.input_ids
    made = requests.request(processor, recipe, row, ids)
    sent = made["prompt_token_ids"]
    assert (sent.count(PAD), (ids == PAD).sum()) == (2, 2 * 6)
    assert [token for token in sent if token != PAD] == [token for token in ids.tolist() if token != PAD]
    assert [image.size for image in made["multi_modal_data"]["image"]] == [(96, 64)] * 2
    assert made.keys() == {"prompt_token_ids", "multi_modal_data"}  # limits of pixels are those of the folder's files
    text = make_row({"messages": [{"role": "user", "content": "?"}, ANSWER]}, "rows:2", Access(Path()))
    assert requests.request(processor, recipe, text, torch.tensor([5, 6])) == {"prompt_token_ids": [5, 6]}


def test_settings_of_a_single_medium_are_refused() -> None:
    recipe = load_recipe("qwen3_vl_sft", TINY)
    part = {"type": "image", "image": Image.new("RGB", (64, 64)), "max_pixels": 1024}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}, ANSWER]
    row = make_row({"messages": messages}, "rows:3", Access(Path(), outside=True))
    with pytest.raises(UserError, match="rows:3: settings of a single image"):
        requests.request(assemble(recipe).processor, recipe, row, torch.tensor([1]))


def test_a_video_that_is_heard_is_refused() -> None:
    recipe = load_recipe("qwen3_omni_sft", TINY)
    row = next(row for row in read_rows("digits:train") if row.use_audio_in_video)
    with pytest.raises(
        UserError, match=r"a video whose sound is heard, .* leave such rows out, or take rl\.rollout=zoo"
    ):
        requests.request(assemble(recipe).processor, recipe, row, torch.tensor([1]))


@pytest.mark.parametrize(
    ("expanded", "short", "wanted"),
    [
        ([1, BEGIN, PAD, PAD, PAD, END, 7, 8], [1, BEGIN, PAD, END, 7, 8, 9], [1, BEGIN, PAD, END, 7, 8]),
        # Frames with their times, which vLLM writes; and a medium that nothing stands around.
        ([1, 50, BEGIN, PAD, END, 51, BEGIN, PAD, END, 7], [1, BEGIN, PAD, END, 7, 9], [1, BEGIN, PAD, END, 7]),
        ([PAD, PAD, 4, PAD, PAD], [PAD, 4, PAD, 9], [PAD, 4, PAD]),
    ],
)
def test_placeholders_are_joined(expanded: list[int], short: list[int], wanted: list[int]) -> None:
    assert requests.with_placeholders(expanded, short, frozenset({BEGIN, PAD, END})) == wanted


def test_media_go_as_they_were_decoded() -> None:
    frames = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    sounds = [np.ones(160, np.float32), np.ones(110, np.float32)]
    media = LoadedMedia({"videos": [frames], "audio": sounds}, [Pace(2.0, 1.5)])
    data = requests.multi_modal_data(media, 50)
    assert data.keys() == {"video", "audio"}
    assert [(len(samples), rate) for samples, rate in data["audio"]] == [(150, 16000), (110, 16000)]
    ((clip, shown),) = data["video"]
    assert clip.shape == (2, 4, 5, 3) and clip[1, 2, 3, 0] == frames[1, 0, 2, 3]
    assert (shown["frames_indices"], shown["fps"], shown["do_sample_frames"]) == ([3, 4], 2.0, False)


def test_another_prompt_than_the_sample_is_refused() -> None:
    requests.check_read([1, 5, 3], [1, 2, 3], {5: 2}, "rows:1")
    with pytest.raises(UserError, match=r"rows:1: vLLM reads 3 tokens of the prompt and zoo 4, .* from token 3 on"):
        requests.check_read([1, 2, 3], [1, 2, 3, 4], {}, "rows:1")
    with pytest.raises(UserError, match="from token 1 on"):
        requests.check_read([1, 5, 3], [1, 2, 3], {}, "rows:1")


def test_answers_are_read_with_their_end_and_their_experts() -> None:
    experts = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)  # three layers, the first without experts
    answer = requests.answer(completion([8, 9, 7], experts), frozenset({7}), 2, [1, 2])
    assert (answer.token_ids, answer.logprobs, answer.finished) == ((8, 9, 7), (-0.5, -1.0, -1.5), True)
    assert answer.routing is not None and answer.routing.dtype == np.int16
    assert answer.routing[:4].tolist() == experts[:, 1:].tolist() and (answer.routing[4] == -1).all()
    cut = requests.answer(completion([8, 9], experts), frozenset({7}), 2, None)
    assert not cut.finished and cut.routing is None
    recipe = load_recipe("qwen3_vl_sft", TINY)
    row = two_images()
    prompt = RolloutPrompt(4, row, make_prompt(assemble(recipe).processor, row, recipe.data, most=8192).sample)
    processor = assemble(recipe).processor
    tokens = (*processor.tokenizer.encode("One."), processor.ends["<|im_end|>"])
    rollout = requests.Answer(tokens, (0.0,) * len(tokens), True, answer.routing).rollout(prompt, 1, processor)
    assert (rollout.text, rollout.number, rollout.finished) == ("One.", 1, True) and rollout.routing is not None


@pytest.mark.parametrize(
    ("keys", "mode"),
    [([], "raw_logprobs"), (["rl.top_p=0.9"], "raw_logprobs"), (["rl.temperature=0.7"], "processed_logprobs")],
)
def test_log_probabilities_are_those_between_temperature_and_top_p(keys: list[str], mode: str) -> None:
    recipe = load_recipe("qwen3_vl_grpo", [*TINY, "rl.rollout=vllm", *keys])
    assert options.logprobs_mode(recipe) == mode


def test_temperature_and_top_p_together_are_refused() -> None:
    keys = [*TINY, "rl.rollout=vllm", "rl.temperature=0.7", "rl.top_p=0.9"]
    with pytest.raises(ConfigError, match=r"rl\.temperature=0\.7 with rl\.top_p=0\.9: .* take 1 for one of them"):
        validate(load_recipe("qwen3_vl_grpo", keys), 1)
    validate(load_recipe("qwen3_vl_grpo", [*keys, "rl.rollout=zoo"]), 1)


def test_arguments_of_a_gpu_and_of_a_cpu(tmp_path: Path) -> None:
    keys = ["rl.algorithm=grpo", "rl.rollout=vllm", "rl.vllm.memory=0.3", "rl.vllm.options={max_num_seqs: 8, seed: 5}"]
    recipe = load_recipe("qwen3_vl_sft", [*TINY, "engine.precision=bf16", "packing.budget=3000", *keys])
    on_gpu = options.arguments(recipe, tmp_path, torch.device("cuda", 1), 16, routing=True)
    assert (on_gpu["gpu_memory_utilization"], on_gpu["enable_sleep_mode"], on_gpu["dtype"]) == (0.3, True, "bfloat16")
    assert (on_gpu["max_model_len"], on_gpu["max_lora_rank"], on_gpu["enable_return_routed_experts"]) == (
        3000,
        16,
        True,
    )
    assert (on_gpu["max_num_seqs"], on_gpu["seed"]) == (8, 5)  # the user's before zoo's
    on_cpu = options.arguments(recipe, tmp_path, torch.device("cpu"), None, routing=False)
    assert on_cpu["enforce_eager"] and "enable_sleep_mode" not in on_cpu and "enable_lora" not in on_cpu


def test_a_missing_vllm_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"vLLM is not installed in this environment; pip install 'zoo-train\[vllm\]'"):
        options.check_installed()


@pytest.mark.parametrize(
    ("replicas", "tensor_parallel", "engines", "prompts", "answers"),
    [
        ([0, 1], 1, {0: [0], 1: [1]}, False, False),
        ([0, 0, 1, 1], 1, {0: [0, 1], 1: [2, 3]}, False, True),  # a replica of two ranks has two engines
        ([0, 0, 1, 1], 2, {0: [0], 1: [1]}, False, False),
        ([0, 1], 2, {0: [0], 1: [0]}, True, False),  # an engine answers to two replicas
        ([0, 1, 0, 1], 1, {0: [0, 2], 1: [1, 3]}, False, True),  # stages of a pipeline lie apart
        ([0, 1, 0, 1], 2, {0: [0, 1], 1: [0, 1]}, True, True),
    ],
)
def test_engines_and_replicas(
    replicas: list[int], tensor_parallel: int, engines: dict[int, list[int]], prompts: bool, answers: bool
) -> None:
    made = plan(replicas, tensor_parallel)
    assert {replica: made.engines_of(replica) for replica in set(replicas)} == engines
    assert (made.exchange_prompts, made.exchange_answers) == (prompts, answers)


def test_prompts_have_seeds_of_their_own() -> None:
    seeds = {seed_of(run, prompt) + sample for run in range(5) for prompt in range(50) for sample in range(16)}
    assert len(seeds) == 5 * 50 * 16 and max(seeds) < 2**63
    assert seed_of(1234, 7) == seed_of(1234, 7)


@pytest.mark.parametrize(
    ("woken", "wanted"),
    [
        ([], ["off", "weights", "kv_cache", "end", "on"]),
        (["wake"], ["kv_cache", "end", "on"]),
        (["wake", "_take_cache"], ["end", "on"]),
    ],
)
def test_an_engine_that_sleeps_is_awake_before_its_memory_is_freed(
    woken: list[str], wanted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What sleeps is unmapped already, and vLLM's allocator of CUDA would unmap it once more."""
    noted: list[str] = []
    engine = object.__new__(VllmEngine)
    engine.recipe, engine.folder = load_recipe("qwen3_grpo", ["size=tiny"]), tmp_path / "files"
    engine.asleep = engine.sleeps = engine.cacheless = True
    engine.memory = SimpleNamespace(move=lambda back, _: noted.append("on" if back else "off"))  # type: ignore[assignment]
    engine.sharing = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    engine._llm = SimpleNamespace(wake_up=lambda tags: noted.extend(tags))
    monkeypatch.setattr(VllmEngine, "_as_vllm", lambda self: nullcontext())
    monkeypatch.setattr("zoo.rollouts.vllm.engine._shut_down", lambda llm: noted.append("end"))
    for name in woken:
        getattr(engine, name)()
    noted.clear()
    engine.close()
    engine.close()
    assert noted == wanted and not engine.asleep
