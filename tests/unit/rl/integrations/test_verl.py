"""zoo as verl's engine, held to transformers' log-probabilities and gradients under verl's own loss; skipped without verl."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.loops import hf_values, loop_batch, loop_examples
from support.matrix import MODELS
from support.tiny import load_plain
from torch import Tensor

pytest.importorskip("verl", reason="verl is not installed (docs/verl.md)")

HEAT = 0.7
REQUIRED = ("initialize", "train_mode", "eval_mode", "optimizer_zero_grad", "optimizer_step", "lr_scheduler_step",
            "forward_backward_batch", "get_per_tensor_param", "get_data_parallel_size", "get_data_parallel_rank",
            "get_data_parallel_group", "to", "save_checkpoint", "load_checkpoint", "is_mp_src_rank_with_outputs",
            "disable_adapter", "is_param_offload_enabled", "is_optimizer_offload_enabled")  # fmt: skip


@pytest.fixture
def gloo() -> Iterator[None]:
    """torch.distributed as verl's workers have it before they make an engine."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@dataclass
class Case:
    """A tiny model, its rows as verl holds them, and where in a row its response begins."""

    folder: Path
    examples: list[Any]
    batch: dict[str, Any]
    starts: list[int]

    @classmethod
    def make(cls, folder: Path) -> "Case":
        MODELS["dense"].write(folder)
        examples = loop_examples(folder, MODELS["dense"])
        batch = loop_batch(examples, "right", 0)
        return cls(folder, examples, batch, [int(row.nonzero()[0]) for row in batch["loss_mask"]])

    def responses(self, values: Tensor) -> Tensor:
        """(B, R) of (B, T): from each row's response on, padded on the right."""
        ends = [example.length for example in self.examples]
        width = max(end - start for start, end in zip(self.starts, ends, strict=True))
        found = values.new_zeros(len(ends), width)
        rows = [values[row, start:end] for row, (start, end) in enumerate(zip(self.starts, ends, strict=True))]
        return torch.stack([torch.cat([row, blank[len(row) :]]) for row, blank in zip(rows, found, strict=True)])

    def prompts(self, values: Tensor) -> Tensor:
        """(B, P) of (B, T): what stands before, padded on the left."""
        width = max(self.starts)
        return torch.stack(
            [
                torch.cat([row.new_zeros(width - start), row[:start]])
                for row, start in zip(values, self.starts, strict=True)
            ]
        )

    def data(self, old: Tensor) -> Any:
        """A TensorDict without padding, as verl's trainer hands it to a worker."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import left_right_2_no_padding

        real = self.batch["attention_mask"].long()
        mask = torch.cat([self.prompts(real), self.responses(real)], 1)
        prompts, responses = self.prompts(self.batch["input_ids"]), self.responses(self.batch["input_ids"])
        tensors = {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": mask,
            "response_mask": self.responses(self.batch["loss_mask"]),
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "old_log_probs": old,
            "advantages": self.responses(self.batch["advantages"]),
            "multi_modal_inputs": [one or {} for one in self.batch["media"]],
        }
        settings = {"temperature": HEAT, "calculate_entropy": True, "global_batch_size": len(prompts)}
        return left_right_2_no_padding(tu.get_tensordict(tensors, non_tensor_dict=settings))

    def engine(self, *overrides: str, **settings: Any) -> Any:
        """What verl's registry makes of verl's settings."""
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import HFModelConfig, OptimizerConfig
        from verl.workers.engine.base import EngineRegistry

        from zoo.rl.integrations.verl import ZooEngineConfig

        budget = max(example.length for example in self.examples) + 8
        config = ZooEngineConfig(
            dtype="float32", max_token_len_per_gpu=budget, overrides=["engine.threads=1", *overrides], **settings
        )
        engine = EngineRegistry.new(
            model_type="language_model",
            backend="zoo",
            model_config=HFModelConfig(path=str(self.folder)),
            engine_config=config,
            optimizer_config=OptimizerConfig(lr=1e-2, total_training_steps=4, lr_warmup_steps=2),
            checkpoint_config=CheckpointConfig(),
        )
        engine.initialize()
        return engine


def policy_loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """verl's own clipped loss with an entropy bonus."""
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = ActorConfig(strategy="zoo", rollout_n=1, ppo_micro_batch_size_per_gpu=1, entropy_coeff=0.01)
    return partial(ppo_loss, config=config)(model_output=model_output, data=data, dp_group=dp_group)


def nested(values: Tensor, examples: list[Any]) -> Tensor:
    """Values at their tokens as verl's models give them: nested, at the token before."""
    rows = [torch.cat([row[1 : e.length], row[:1] * 0]) for row, e in zip(values, examples, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@pytest.mark.usefixtures("gloo")
def test_values_gradients_weights_and_checkpoints(tmp_path: Path) -> None:
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import no_padding_2_padding

    case = Case.make(tmp_path / "model")
    hf = load_plain(case.folder)
    wanted = hf_values(hf, case.examples, case.batch, temperature=HEAT)
    old = case.responses(wanted.logprobs.detach() + case.batch["noise"])
    data, engine = case.data(old), case.engine()
    try:
        with engine.eval_mode():
            output = engine.infer_batch(data)["model_output"]
        real = case.responses(case.batch["attention_mask"]).bool()
        for name, values in (("log_probs", wanted.logprobs), ("entropy", wanted.entropy)):
            found = no_padding_2_padding(output[name], data)
            assert float((found - case.responses(values.detach()))[real].abs().max()) < 2e-5, name

        loss, _ = policy_loss(
            {"log_probs": nested(wanted.logprobs, case.examples), "entropy": nested(wanted.entropy, case.examples)},
            tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(case.batch["loss_mask"].sum())),
        )
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in hf.parameters() if p.grad is not None]).norm()
        weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
        for name, tensor in hf.state_dict().items():
            if name in weights:
                torch.testing.assert_close(tensor, weights[name], rtol=0, atol=0)
        with engine.train_mode():
            trained = engine.train_batch(data, policy_loss)
            rates = [engine.lr_scheduler_step() for _ in range(3)]
        assert trained["metrics"]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert len(trained["loss"]) > 1 and sum(trained["loss"]) == pytest.approx(float(loss), abs=1e-4)
        assert trained["metrics"]["actor/pg_loss"].aggregate() == pytest.approx(float(loss), abs=0.1)
        assert rates == pytest.approx([5e-3, 1e-2, 1e-2])
        moved = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
        assert any(not torch.equal(tensor, weights[name]) for name, tensor in moved.items())

        engine.save_checkpoint(str(tmp_path / "saved"), global_step=7)
        with engine.train_mode():
            engine.train_batch(data, policy_loss)
        engine.load_checkpoint(str(tmp_path / "saved"))
        for name, tensor in engine.get_per_tensor_param()[0]:
            torch.testing.assert_close(tensor, moved[name], rtol=0, atol=0)
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.usefixtures("gloo")
def test_an_actor_and_its_reference_share_the_ranks(tmp_path: Path) -> None:
    case = Case.make(tmp_path / "model")
    data = case.data(case.responses(torch.zeros(case.batch["input_ids"].shape)))
    reference = case.engine(forward_only=True, param_offload=True)
    actor = case.engine(param_offload=True, optimizer_offload=True)
    try:
        with reference.eval_mode():
            before = reference.infer_batch(data)["model_output"]["log_probs"].values()
        for _ in range(2):
            with actor.train_mode():
                actor.train_batch(data, policy_loss)
        with actor.eval_mode():
            after = actor.infer_batch(data)["model_output"]["log_probs"].values()
        with reference.eval_mode():
            again = reference.infer_batch(data)["model_output"]["log_probs"].values()
        torch.testing.assert_close(before, again, rtol=0, atol=0)
        assert not torch.equal(before, after)
        assert all(p.untyped_storage().nbytes() == 0 for c in actor.engine._parts.chunks for p in c.parameters())
    finally:
        actor.close()
        reference.close()


def test_every_call_of_verls_engine_is_there() -> None:
    from verl.workers.engine.base import BaseEngine

    from zoo.errors import UserError
    from zoo.rl.integrations.verl import ZooEngine, ZooEngineConfig, recipe_of

    assert [name for name in REQUIRED if getattr(ZooEngine, name) is getattr(BaseEngine, name)] == []
    with pytest.raises(UserError, match="dtype=float16"):
        recipe_of(None, ZooEngineConfig(dtype="float16"), None)


@pytest.mark.slow
@pytest.mark.usefixtures("gloo")
def test_verls_own_worker_makes_actor_and_reference_of_the_pages_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/verl.md's command as Hydra and verl read it, on a model and ranks that are here."""
    import shlex
    from importlib.resources import files

    from hydra import compose, initialize_config_dir
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from zoo.rl.integrations import verl as integration

    case = Case.make(tmp_path / "model")
    page = (Path(__file__).parents[4] / "docs" / "verl.md").read_text()
    command = page.partition("python -m verl.trainer.main_ppo ")[2].partition("```")[0]
    here = (
        f"actor_rollout_ref.model.path={case.folder}", "actor_rollout_ref.actor.zoo.overrides=['engine.threads=1','train.beta2=0.98']",
        "actor_rollout_ref.actor.zoo.dtype=float32", "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.optim.lr=3e-4",
        "trainer.n_gpus_per_node=1", "trainer.device=cpu",
    )  # fmt: skip
    with initialize_config_dir(str(files("verl.trainer") / "config"), version_base=None):
        config = compose("ppo_trainer", [*shlex.split(command.replace("\\\n", " ")), *here])
    assert need_reference_policy(config) and not need_critic(config)
    validate_config(config, use_reference_policy=True, use_critic=False)
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29555}.items():
        monkeypatch.setenv(name, str(value))
    made = {}
    try:
        for role in ("ref", "actor"):
            worker = ActorRolloutRefWorker(config.actor_rollout_ref, role=role)
            worker.init_model()
            made[role] = getattr(worker, role).engine
        assert all(isinstance(engine, integration.ZooEngine) for engine in made.values())
        assert made["ref"].engine_config.forward_only and not made["actor"].engine_config.forward_only
        recipes = [made[role].engine.recipe for role in ("ref", "actor")]
        assert [recipe.train.beta2 for recipe in recipes] == [0.98, 0.98] and recipes[1].train.lr == 3e-4
        assert all(Path(str(recipe.model.init)) == case.folder for recipe in recipes)
        assert made["actor"].is_param_offload_enabled and recipes[1].packing.budget == 16384
    finally:
        for engine in made.values():
            engine.close()
