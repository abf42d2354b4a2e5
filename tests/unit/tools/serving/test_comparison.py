"""A server's token ids and log-probabilities beside zoo's: transformers behind an address, whole and broken in known ways."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from safetensors.torch import load_file, save_file
from support.openai_server import Answer, Refusal, TransformersModel, serving
from support.tiny_qwen3 import write_tiny_qwen3
from support.tiny_qwen3_vl import write_tiny_qwen3_vl

import zoo
from zoo.cli.checkpoints.verify import served_table
from zoo.cli.main import main
from zoo.errors import UserError
from zoo.tools.serving.comparison import LIMITS
from zoo.tools.serving.row_comparison import MOST_NEW, first_difference
from zoo.tools.serving.server import Server

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "ü": "ß"}}}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Say 3."}, {"role": "assistant", "content": " 3 \n"}]},
    {"text": "A plain text."},
    {
        "messages": [
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "1+2?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "<think>\nit was\n</think>\n\nIt is 3."},
        ],
        "tools": TOOLS,
    },
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def model(weights: Path) -> TransformersModel:
    return TransformersModel(weights)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in CHATS))
    return str(file)


def compared(weights: Path, rows: Any, url: str, **options: Any) -> Any:
    return zoo.verify_served(weights, served=url, rows=rows, in_process=True, **options)


def test_a_server_of_the_same_weights_is_equal(weights: Path, model: TransformersModel, rows: str) -> None:
    with serving(model) as url:
        result = compared(weights, rows, url)
        assert result.equal and result.limit == LIMITS["float32"] and result.server == f"{url} 1.2.3"
        scored = zoo.score(weights, rows, in_process=True)
        assert [len(row["differences"]) for row in result.rows] == [
            sum(label != -100 for label in row["labels"]) - ("text" in chat)  # the text's end is in no request
            for row, chat in zip(scored, CHATS, strict=True)
        ]
        assert 0 < result.largest_difference < 1e-4 and result.percentiles[99] <= result.largest_difference
        assert served_table(result).endswith("\nequal")


def test_images_go_in_their_order(tmp_path: Path) -> None:
    folder = write_tiny_qwen3_vl(tmp_path / "weights")
    pixels = np.random.default_rng(0).integers(0, 255, (2, 64, 96, 3), dtype=np.uint8)
    for name, array in zip(("a.png", "b.webp"), pixels, strict=True):
        Image.fromarray(array).save(tmp_path / name, lossless=True)
    question = "<image> is not <image>, nor <image>"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "Why?"}]
    images = [str(tmp_path / "a.png"), str(tmp_path / "b.webp"), Image.fromarray(pixels[0, :32])]
    turned = TransformersModel(folder)
    with serving(turned) as url:
        assert compared(folder, [{"messages": turns, "images": images}], url).equal
        alone = compared(folder, [{"messages": turns, "images": [images[0]] * 3}], url)
        assert alone.equal

    def last_image_first(path: str, body: Answer) -> Answer:
        parts = [part for part in body["messages"][0]["content"] if part["type"] == "image_url"]
        parts[0]["image_url"], parts[1]["image_url"] = parts[1]["image_url"], parts[0]["image_url"]
        return turned(path, body)

    with serving(last_image_first) as url:
        swapped = compared(folder, [{"messages": turns, "images": images}], url)
        assert not swapped.equal and swapped.largest_difference > swapped.limit


def test_every_row_over_the_limit_is_named_and_what_its_images_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_qwen3_vl(tmp_path / "weights")
    pixels = np.random.default_rng(0).integers(0, 255, (64, 96, 4), dtype=np.uint8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.fromarray(pixels[..., :3]).save(tmp_path / "turned.jpg", exif=exif)
    grey = Image.fromarray((pixels[..., 0].astype(np.uint16) + 1) * 200)
    images = [pixels[..., :3], pixels, grey, str(tmp_path / "turned.jpg")]
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "This."}]
    opened = [Image.fromarray(each) if isinstance(each, np.ndarray) else each for each in images]
    rows = [{"messages": turns, "images": [image]} for image in opened]
    plain = TransformersModel(folder)

    def off(path: str, body: Answer) -> Answer:
        answer = plain(path, body)
        for entry in filter(None, answer["prompt_logprobs"]):
            for value in entry.values():
                value["logprob"] -= 9.0
        return answer

    with serving(off) as url:
        result = compared(folder, rows, url)
    odd = [None, ["transparent pixels"], ["16 bits a channel"], ["an orientation"]]
    assert [row.get("read_otherwise") for row in result.rows] == odd and len(result.rows_over_limit) == 4
    table = served_table(result)
    assert [table.count(f"{row['source']}: {len(row['differences'])} of ") for row in result.rows] == [1] * 4
    assert f"{result.rows[1]['source']} (transparent pixels), " in table
    monkeypatch.setattr("zoo.cli.checkpoints.verify._SHOWN", 3)
    assert "... and 1 more rows over the limit" in served_table(result)


def test_a_log_probability_that_is_off_is_named(
    weights: Path, model: TransformersModel, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def off(path: str, body: Answer) -> Answer:
        answer = model(path, body)
        if body.get("tools"):
            (value,) = answer["prompt_logprobs"][-3].values()
            value["logprob"] -= 0.25
        return answer

    with serving(off) as url:
        result = compared(weights, rows, url)
        assert not result.equal and result.largest_difference == pytest.approx(0.25, abs=1e-3)
        worst = result.worst_row
        assert worst["source"].endswith(":3") and worst["worst"]["server"] < worst["worst"]["zoo"]
        assert compared(weights, rows, url, limit=10.0).equal
        assert main(["verify", str(weights), f"served={url}", f"rows={rows}", "limit=0.2", "max_rows=3"]) == 1
        assert f"largest at {worst['source']}, position" in capsys.readouterr().out


def test_other_ids_are_shown_where_they_begin(weights: Path, model: TransformersModel, rows: str) -> None:
    def without_system(path: str, body: Answer) -> Answer:
        body["messages"] = [message for message in body.get("messages", ()) if message["role"] != "system"]
        return model(path, body)

    with serving(without_system) as url:
        result = compared(weights, rows, url)
        (row,) = result.rows_with("ids_differ")
        assert row["source"].endswith(":3") and not result.equal
        assert row["ids_differ"]["server_length"] < row["ids_differ"]["zoo_length"]
        assert f"{row['source']}: other token ids from position" in served_table(result)


def test_rows_that_are_refused_or_cannot_be_sent(weights: Path, model: TransformersModel, rows: str) -> None:
    def without_tools(path: str, body: Answer) -> Answer:
        if body.get("tools"):
            raise Refusal("no tools,\nplease")
        return model(path, body)

    def nothing(path: str, body: Answer) -> Answer:
        raise Refusal("This model's maximum context length is 2 tokens")

    with serving(without_tools) as url:
        result = compared(weights, rows, url)
        assert [row["refused"] for row in result.rows_with("refused")] == ["400: no tools, please"] and not result.equal
    with serving(nothing) as url, pytest.raises(UserError, match="takes none of the rows: 400: This model's maximum"):
        compared(weights, rows, url)


def test_scores_of_a_reward_model(weights: Path, rows: str, tmp_path: Path) -> None:
    folder = tmp_path / "reward"
    shutil.copytree(weights, folder)
    tensors = load_file(folder / "model.safetensors")
    width = tensors.pop("lm_head.weight").shape[1]
    tensors["score.weight"] = torch.randn(1, width, generator=torch.Generator().manual_seed(0))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3ForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = TransformersModel(folder)
    with serving(model) as url:
        result = compared(folder, [*CHATS, {"messages": CHATS[2]["messages"][1:2] + CHATS[2]["messages"][-1:]}], url)
        assert result.equal and len(result.differences) == 2 and result.largest_difference < 1e-4
        assert [row["skipped"] for row in result.rows if "skipped" in row] == [
            "a plain text is no conversation, which a reward model reads",
            "vLLM's /classify, which asks a reward model, takes no tools",
        ]
    assert len({row["worst"]["server"] for row in result.rows_with("differences")}) == 2

    def longer(path: str, body: Answer) -> Answer:
        return model(path, body | {"add_generation_prompt": True})

    with serving(longer) as url:
        assert len(compared(folder, rows, url).rows_with("ids_differ")) == 1


def test_greedy_answers_of_a_server_without_log_probabilities(
    weights: Path, model: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [chat for chat in CHATS if "messages" in chat]
    monkeypatch.setattr(Server, "only_answers", True)
    with serving(model.answer) as url:
        result = compared(weights, rows, url)
        assert result.equal and len(result.rows_with("answers")) == 2 and result.quantity == "greedy answers"
        assert all(row["answers"]["zoo"] for row in result.rows_with("answers"))
        assert served_table(result).endswith("no log-probabilities of prompts: 0 differ, 0 refused\nequal")

    def other(path: str, body: Answer) -> Answer:
        assert body["messages"][-1]["role"] in ("user", "tool") and body["max_tokens"] == MOST_NEW
        return {"choices": [{"message": {"content": "no"}}]}

    with serving(other) as url:
        result = compared(weights, rows, url)
        assert not result.equal and "the server 'no'" in served_table(result)


@pytest.mark.parametrize("missing", ["prompt_logprobs", "prompt_token_ids"])
def test_a_server_that_has_no_such_numbers_is_refused(
    missing: str, weights: Path, model: TransformersModel, rows: str
) -> None:
    def less(path: str, body: Answer) -> Answer:
        answer = model(path, body)
        for part in (answer, answer["choices"][0]):
            part.pop(missing, None)
        return answer

    with serving(less) as url, pytest.raises(UserError, match=f"its answers have no {missing} "):
        compared(weights, rows, url)


def test_mistakes_are_found_before_anything_is_computed(
    weights: Path, model: TransformersModel, tmp_path: Path
) -> None:
    nowhere = "no such rows"
    with serving(model, ("one", "two")) as url:
        with pytest.raises(UserError, match="several models; choose with served_model=: one, two"):
            compared(weights, nowhere, url)
        with pytest.raises(UserError, match="no model 'three'; it has one, two"):
            compared(weights, nowhere, url, served_model="three")
    with pytest.raises(UserError, match="no answer"):
        compared(weights, nowhere, url)
    with pytest.raises(UserError, match="served=vlm: no such program on PATH"):
        compared(weights, nowhere, "vlm")
    with pytest.raises(UserError, match="limit=-1: wanted a number from 0"):
        compared(weights, nowhere, url, limit=-1)
    with pytest.raises(UserError, match="no Hugging Face folder, which servers load"):
        compared(tmp_path, nowhere, url)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(weights), "r": 4}))
    with pytest.raises(UserError, match="without the run that they are of"):
        compared(adapters, nowhere, url)


def test_where_ids_differ_first() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 2]) is None, "the end of the last turn, which templates may leave out"
    assert first_difference([1, 2, 3], [1]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2, 3], [1, 3, 3]) == 1
    assert first_difference([1, 2], []) == 0
    assert first_difference([1, 9, 9], [1, 8, 8], {8: 9}) is None, "another placeholder, which the model reads alike"
    assert first_difference([1, 8], [1, 9], {8: 9}) == 1, "the other way round it is text"
