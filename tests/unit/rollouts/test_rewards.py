"""Rewards by name counted by hand, and users' functions that do what functions of users do."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from zoo.data.sources.rows import Message, Row
from zoo.errors import UserError
from zoo.rollouts.engine import Rollout, RolloutPrompt
from zoo.rollouts.rewards.named import find_reward
from zoo.rollouts.rewards.rewards import Rewards

FUNCTIONS = """
import os, signal, sys, time
class Number:
    def __float__(self): return 0.25
def length(answer, references, row): return len(answer)
def facts(answer, references, row):
    row["answers"].append("changed")
    return len(row["answers"]) + 10 * len(references) + 100 * (row["messages"][0]["content"] == "which?")
def odd(answer, references, row): return True if answer == "a0" else Number()
def nothing(answer, references, row): return None if answer == "a3" else 1
def not_finite(answer, references, row): return float("nan") if answer == "a3" else 1
def text(answer, references, row): return "1" if answer == "a3" else 1
def raises(answer, references, row): return {}["key"] if answer == "a3" else 1
def exits(answer, references, row): return sys.exit(3) if answer == "a3" else 1
def interrupts(answer, references, row):
    if answer == "a3": raise KeyboardInterrupt
    return 1
def ends(answer, references, row): return os._exit(9) if answer == "a3" else 1
def crashes(answer, references, row): return os.kill(os.getpid(), signal.SIGSEGV) if answer == "a3" else 1
def hangs(answer, references, row):
    while answer == "a3": signal.alarm(0)
    return 1
def leaves_a_child(answer, references, row):
    if answer == "a3":
        if not os.fork(): time.sleep(1000)
        os._exit(4)
    return 1
def forks(answer, references, row):
    os.fork()
    print("x" * 100000)
    return 1
def takes_all(answer, references, row, **extra):
    return sum(extra.values())
not_callable = 1
"""
ROW = Row(messages=(Message("user", "which?"),), answers=("b", "a3"), source="rows.jsonl:7")
REFERENCES = ("Paris", "the answer is 1,250 kg")


def rollouts(count: int, samples: int = 4, row: Row = ROW) -> list[Rollout]:
    prompts = [RolloutPrompt(number, row, None) for number in range(count)]  # type: ignore[arg-type]
    return [
        Rollout(prompts[number // samples], number % samples, (1,), (0.0,), True, f"a{number}")
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "own.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture
def opened() -> Iterator[list[Rewards]]:
    every: list[Rewards] = []
    yield every
    for rewards in every:
        rewards.close()


@pytest.mark.parametrize(
    ("name", "answer", "wanted"),
    [
        ("exact_match", " Paris\n", 1.0),
        ("exact_match", "paris", 0.0),
        ("accuracy", "The Paris.", 1.0),
        ("exact_match", "<think>Rome?</think><answer>Paris</answer>", 1.0),
        ("exact_match", "<think>Paris", 0.0),
        ("exact_match", "It is </think> Paris", 1.0),
        ("exact_match", "<answer>Rome</answer> no: <answer>Paris</answer>", 1.0),
        ("number", "between 3 and 1250.0", 1.0),
        ("number", "1200", 0.0),
        ("number", "none", 0.0),
        ("number=0.05", "1200", 1.0),
        ("anls", "Pariz", 0.8),
        ("wer", "Paris France", 0.0),
        ("wer", "the answer is 1,250 lb", 5 / 6),  # 1 of 6 words: the comma parts two
        ("cer", "Pari", 0.8),
        ("iou", "Paris", 1.0),  # neither has a box
        ("format", "<think>so\n</think>\n<answer>1</answer> ", 1.0),
        ("format", "<think></think><think></think><answer>1</answer>", 0.0),
        ("format", "<think>a</think> b <answer>1</answer>", 0.0),
        ("format", "<answer>1</answer><think>a</think>", 0.0),
        ("format", "", 0.0),
        ("format=\\d+: .*", "12: Paris\nFrance", 1.0),
        ("format=\\d+: .*", "a 12: Paris", 0.0),
    ],
)
def test_named_rewards_counted_by_hand(name: str, answer: str, wanted: float) -> None:
    assert find_reward(name)(answer, REFERENCES, {}) == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["exact", "number=x", "number=2", "format=(", "none_such"])
def test_refuses_what_is_no_reward(name: str) -> None:
    with pytest.raises(UserError, match=r"no such reward|number=0\.05|no regular expression"):
        Rewards({name: 1.0})


def test_rewards_stand_in_the_order_of_their_weights(functions: str, opened: list[Rewards]) -> None:
    rewards = Rewards({f"{functions}:length": 2.0, "exact_match": 0.5, f"{functions}:facts": 1.0}, processes=2)
    opened.append(rewards)
    answers = rollouts(12)
    found = rewards.score(answers).values
    assert found[:, 0].tolist() == [2.0] * 10 + [3.0] * 2
    assert found[:, 1].tolist() == [float(number == 3) for number in range(12)]
    assert found[:, 2].tolist() == [123.0] * 12  # what one call changes, no other sees
    assert rewards.score(answers[::-1]).values.tolist() == found.tolist()[::-1]
    assert rewards.score([]).values.shape == (0, 3)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nothing", "returned None"),
        ("not_finite", "returned nan"),
        ("text", "returned '1'"),
        ("raises", "raised KeyError: 'key'"),
        ("exits", r"SystemExit\(3\)"),
        ("interrupts", "raised KeyboardInterrupt"),
        ("ends", r"ended its process \(exit code 9\)"),
        ("crashes", r"ended its process \(signal 11\)"),
        ("leaves_a_child", r"ended its process \(exit code 4\)"),
        ("hangs", "longer than 0.5 s"),
    ],
)
def test_a_function_that_fails_is_named_or_counts_0(
    functions: str, name: str, reason: str, opened: list[Rewards]
) -> None:
    """All other answers have their rewards, also those that the same process was to get."""
    weights = {f"{functions}:{name}": 1.0, "exact_match": 1.0}
    rewards = [Rewards(weights, seconds=0.5, zero_failures=zero) for zero in (False, True)]
    opened += rewards
    with pytest.raises(UserError, match=rf"own\.py:{name}: .*{reason}.*'a3' to rows\.jsonl:7"):
        rewards[0].score(rollouts(16))
    found, failures = rewards[1].score(rollouts(16))
    assert found[:, 0].tolist() == [float(number != 3) for number in range(16)]
    assert found[:, 1].sum() == 1 and failures == {f"{functions}:{name}": 1}
    again = rewards[1].score(rollouts(3))
    assert again.values.tolist() == [[1.0, 0.0]] * 3 and not again.failures


def test_a_function_takes_what_the_row_has_for_it_or_is_named(functions: str, opened: list[Rewards]) -> None:
    row = replace(ROW, extra='{"bonus": 2, "malus": -0.5}')
    rewards = Rewards({f"{functions}:takes_all": 1, "exact_match": 1, f"{functions}:forks": 1})
    opened.append(rewards)
    with pytest.raises(
        UserError, match=r"own\.py:forks: it takes no argument 'bonus', which the row has in `extra`, for"
    ):
        rewards.score(rollouts(2, row=row))
    assert rewards.score(rollouts(2)).values[:, 0].tolist() == [0.0, 0.0]
    opened.append(alone := Rewards({f"{functions}:takes_all": 1, "exact_match": 1}))
    assert alone.score(rollouts(2, row=row)).values[:, 0].tolist() == [1.5, 1.5]


def test_numbers_of_all_kinds_forks_and_prints(functions: str, opened: list[Rewards]) -> None:
    rewards = Rewards({f"{functions}:odd": 1.0, f"{functions}:forks": 1.0}, processes=2)
    opened.append(rewards)
    assert rewards.score(rollouts(4)).values.tolist() == [[1.0, 1.0]] + [[0.25, 1.0]] * 3


def test_an_expression_that_never_ends_is_stopped(opened: list[Rewards]) -> None:
    rewards = Rewards({"format=(a|aa)+b": 1.0}, seconds=0.5, zero_failures=True)
    opened.append(rewards)
    prompt = RolloutPrompt(0, ROW, None)  # type: ignore[arg-type]
    answers = [Rollout(prompt, number, (1,), (0.0,), True, text) for number, text in enumerate(("a" * 200, "aab"))]
    values, failures = rewards.score(answers)
    assert values.tolist() == [[0.0], [1.0]] and failures == {"format=(a|aa)+b": 1}


@pytest.mark.parametrize("name", ["missing", "not_callable"])
def test_a_function_that_is_not_there_is_told_at_the_start(functions: str, name: str) -> None:
    with pytest.raises(UserError, match=rf"own\.py:{name}: it (can't be imported|is no function)"):
        Rewards({f"{functions}:{name}": 1.0}).start()


def test_a_reward_models_scores_take_their_column() -> None:
    rewards = Rewards({"exact_match": 1.0, "model": 0.5})
    found = rewards.score(rollouts(4), [0.5, -1.0, 2.0, 3.0]).values
    assert found.T.tolist() == [[0.0, 0.0, 0.0, 1.0], [0.5, -1.0, 2.0, 3.0]]


def test_a_row_without_references_is_named() -> None:
    row = Row(messages=(Message("user", "which?"),), source="rows.jsonl:9")
    with pytest.raises(UserError, match=r"exact_match: rows\.jsonl:9 has no answer"):
        Rewards({"exact_match": 1.0}).score(rollouts(2, row=row))
    assert Rewards({"format": 1.0}).score(rollouts(2, row=row)).values.tolist() == [[0.0], [0.0]]


def test_signs_of_life_come_while_a_function_works(functions: str, opened: list[Rewards]) -> None:
    ticks: list[float] = []
    path = Path(functions).with_name("slow.py")
    path.write_text("import time\ndef reward(answer, references, row): time.sleep(2.5); return 1\n")
    rewards = Rewards({f"{path}:reward": 1.0}, tick=lambda: ticks.append(time.monotonic()))
    opened.append(rewards)
    rewards.start()
    ticks.clear()
    rewards.score(rollouts(1))
    assert len(ticks) >= 2


def test_two_threads_score_one_after_the_other(functions: str, opened: list[Rewards]) -> None:
    """A rollout's rewards are computed in a thread, while held-out answers may be scored."""
    rewards = Rewards({f"{functions}:length": 1.0}, processes=2)
    opened.append(rewards)
    with ThreadPoolExecutor(4) as threads:
        every = [threads.submit(rewards.score, rollouts(count)) for count in (40, 12, 7, 99)]
    for future, count in zip(every, (40, 12, 7, 99), strict=True):
        assert future.result().values[:, 0].tolist() == [float(len(f"a{number}")) for number in range(count)]
