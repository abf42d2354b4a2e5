"""`VllmEngine`: vLLM in the ranks' own processes, on the devices that they train on.

Ranks that follow one another form an engine (`rl.vllm.tensor_parallel` of them): vLLM's external launcher takes this process as it
is and makes process groups of its own beside zoo's. What it changes in the process otherwise is undone after each call.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import save_file

from zoo.bridge.mapping.peft import CONFIG, WEIGHTS
from zoo.checkpoint.sharded_state import Trainable
from zoo.config.schema import Recipe
from zoo.errors import UserError, printable
from zoo.generation.sampling import end_tokens
from zoo.model import build
from zoo.optim.device_memory import Memory
from zoo.parallel.determinism import set_deterministic
from zoo.parallel.megatron.replaced import replaced
from zoo.parallel.process_state import preserve_process_state
from zoo.parallel.weight_gathering import settle_all
from zoo.parallel.world import World
from zoo.rollouts.engine import Rollout, RolloutPrompt
from zoo.rollouts.published_weights import PublishedWeights
from zoo.rollouts.vllm import loading, requests
from zoo.rollouts.vllm.options import arguments, check_installed, served_rank, write_folder
from zoo.rollouts.vllm.requests import Answer
from zoo.rollouts.vllm.sharing import Asked, Sharing
from zoo.types import JsonObject

# Variables under which vLLM runs, beside those that the user has set.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # it warns of layers without weights at each update; missing ones are refused
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # zoo's threads are the same
}
_ADAPTER = "zoo"  # what the adapters are called


class VllmEngine:
    """Generates by vLLM with the weights of the model in training; see `zoo.rollouts.engine.RolloutEngine`.

    While it is awake, gradients and optimizer state are on the host; while it sleeps, its own memory is given back (`rl.vllm.sleep`).
    """

    def __init__(
        self, recipe: Recipe, assembly: build.Assembly, trained: Trainable, world: World, *, replay: bool
    ) -> None:
        """Start vLLM with the weights of now, and let it sleep. Every rank makes one at the same time.

        Args:
            trained: the model in training.
            replay: answers come with the experts of their tokens.

        Raises:
            UserError: vLLM is not installed, can't run the model, or not on so many ranks.
        """
        check_installed()
        self.recipe, self.world, self.processor = recipe, world, assembly.processor
        self.weights = PublishedWeights(assembly, trained.chunks, trained.adapters, world)
        self.memory = Memory(trained.chunks, trained.optimizer)
        # Without a GPU vLLM does not tell the experts.
        every = trained.chunks[0].config.moe_layer_freq if replay and world.device.type == "cuda" else ()
        self.sparse = [layer for layer, has_experts in enumerate(every) if has_experts]
        self.ends = end_tokens(assembly.source.files if assembly.source else None, assembly.processor)
        self.lora_rank = served_rank(trained.adapters, recipe, world.device)
        self.sharing = Sharing(world, recipe.rl.vllm.tensor_parallel)
        self.sleeps = recipe.rl.vllm.sleep and world.device.type == "cuda"
        self.asleep, self.weightless, self.cacheless = False, self.lora_rank is not None, False
        self._leave()
        self.folder = write_folder(assembly, self.weights.config())
        options = arguments(recipe, self.folder, world.device, self.lora_rank, routing=bool(self.sparse))
        try:
            self._llm: Any = self._started(options)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.sleep()

    def generate(self, prompts: Sequence[RolloutPrompt], samples: int) -> list[Rollout]:
        """See `RolloutEngine`.

        Raises:
            UserError: vLLM reads another prompt than zoo, or no prompt of that length.
            RowError: a medium is missing or broken.
        """
        return self._generated(prompts, samples, self.recipe.rl.temperature)

    def most_likely(self, prompts: Sequence[RolloutPrompt]) -> list[Rollout]:
        """See `GreedyEngine`; errors are those of `generate`."""
        return self._generated(prompts, 1, 0.0)

    def _generated(self, prompts: Sequence[RolloutPrompt], samples: int, temperature: float) -> list[Rollout]:
        if self.asleep or self.weightless:
            raise UserError("vLLM has no weights: call wake() and update_weights() before generate()")
        self._take_cache()
        dealt = self.sharing.deal(prompts)
        answers = self._answers(list(dealt.values()), samples, temperature)
        collected = self.sharing.collect(dict(zip(dealt, answers, strict=True)))
        return [
            answer.rollout(prompt, number, self.processor)
            for prompt, group in zip(prompts, collected, strict=True)
            for number, answer in enumerate(group)
        ]

    def update_weights(self) -> None:
        """See `RolloutEngine`."""
        if self.asleep:
            raise UserError("vLLM sleeps: call wake() before update_weights()")
        settle_all()
        with self._as_vllm():
            if self.lora_rank is None:
                self._llm.collective_rpc(loading.reload, args=(self.weights.published(),))
            else:
                self._take_adapters()
            self._llm.llm_engine.reset_encoder_cache()
            self._llm.reset_prefix_cache()
        self.weightless = False

    def sleep(self) -> None:
        """See `RolloutEngine`."""
        if self.asleep:
            return
        if self.sleeps:
            with self._as_vllm():
                # Level 2 keeps nothing, as the weights come anew; beside adapters they stay as they are.
                self._llm.sleep(level=2 if self.lora_rank is None else 1)
            self.weightless, self.cacheless = self.lora_rank is None or self.weightless, True
        self.asleep = True
        self.memory.move(True, ("optimizer", "gradients"))

    def wake(self) -> None:
        """See `RolloutEngine`; the cache of keys and values comes with the first `generate`."""
        if not self.asleep:
            return
        self._leave()
        if self.sleeps:
            with self._as_vllm():
                self._llm.wake_up(tags=["weights"])
        self.asleep = False

    def close(self) -> None:
        """See `RolloutEngine`."""
        if self._llm is None:
            return
        # Memory that sleeps is unmapped, and vLLM's allocator unmaps it again when it is freed: "invalid argument" (0.26 to 0.33).
        self.wake()
        self._take_cache()
        with self._as_vllm():
            _shut_down(self._llm)
        self._llm = None
        self.sharing.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.memory.move(True, ("optimizer", "gradients"))

    def _take_cache(self) -> None:
        """Wake the cache of keys and values, once the weights are there."""
        if not self.cacheless:
            return
        with self._as_vllm():
            torch.cuda.empty_cache()  # of what the weights came in
            self._llm.wake_up(tags=["kv_cache"])
        self.cacheless = False

    def _leave(self) -> None:
        """Move what of the trainer vLLM's work needs no room for to the host."""
        if self.recipe.rl.vllm.sleep:
            self.memory.move(False, ("optimizer", "gradients"))

    def _started(self, options: JsonObject) -> Any:
        with self._as_vllm(), replaced(torch, set_num_threads=torch.set_num_threads):
            from vllm import LLM

            loading.register(lambda: self.weights.published(merged=self.lora_rank is None))
            try:
                llm = LLM(**options)
                # Later vLLM ends what is left at the end of the process, and zoo's process groups with it.
                if finalizer := getattr(llm.llm_engine.engine_core, "_finalizer", None):
                    finalizer.atexit = False
                return llm
            except ValueError as error:  # of an unknown model, too little memory, a wrong option
                text = printable(" ".join(str(error).split()), 600)
                raise UserError(f"rl.rollout=vllm: vLLM does not start: {text}") from error

    @contextmanager
    def _as_vllm(self) -> Iterator[None]:
        """The process as vLLM needs it; zoo's settings are back after the block."""
        with preserve_process_state():
            for name, value in _ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            if self.sparse and importlib.util.find_spec("vllm.config.aux_output") is not None:
                os.environ["VLLM_USE_V2_MODEL_RUNNER"] = (
                    "1"  # which alone tells the experts, in versions that have such a file
                )
            device = self.world.device
            local = 0 if device.index is None else device.index
            os.environ.update(RANK=str(self.world.rank), LOCAL_RANK=str(local), VLLM_ENABLE_V1_MULTIPROCESSING="0")
            set_deterministic(False)  # vLLM has kernels that torch refuses then
            yield

    def _take_adapters(self) -> None:
        """Put the adapters of now in the place of those at hand."""
        from vllm.lora.request import LoRARequest

        tensors, config = self.weights.for_vllm(self.recipe)
        folder = self.folder / "adapter"
        folder.mkdir(exist_ok=True)
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        self._llm.llm_engine.add_lora(LoRARequest(_ADAPTER, 1, str(folder), load_inplace=True))

    def _answers(self, asked: Sequence[Asked], samples: int, temperature: float) -> list[list[Answer]]:
        """The answers of this rank's engine to its prompts."""
        if not asked:
            return []
        prompts = [requests.request(self.processor, self.recipe, prompt.row, prompt.input_ids) for prompt in asked]
        settings = [self._settings(prompt, samples, temperature) for prompt in asked]
        with self._as_vllm():
            outputs = self._llm.generate(prompts, settings, use_tqdm=False, lora_request=self._adapter())
        made = []
        for prompt, output in zip(asked, outputs, strict=True):
            ids = prompt.input_ids.tolist()
            alike = self.processor.placeholders_of_servers
            requests.check_read(output.prompt_token_ids, ids, alike, prompt.row.source)
            sparse = self.sparse or None
            made.append([requests.answer(each, self.ends, len(ids), sparse) for each in output.outputs])
        return made

    def _settings(self, asked: Asked, samples: int, temperature: float) -> Any:
        """vLLM's SamplingParams of a prompt; its samples have seeds that follow one another, and no draws at temperature 0."""
        from vllm import SamplingParams

        rl, length = self.recipe.rl, len(asked.input_ids)
        free_tokens = self._llm.model_config.max_model_len - length
        if free_tokens < 1:
            raise UserError(
                f"{asked.row.source}: a prompt of {length} tokens, and vLLM takes {length + free_tokens} with the answer; raise rl.vllm.max_model_len"
            )
        return SamplingParams(
            n=samples,
            temperature=temperature,
            top_p=rl.top_p if temperature else 1.0,
            seed=seed_of(self.recipe.run.seed, asked.number),
            max_tokens=min(rl.max_new_tokens, free_tokens),
            logprobs=0,
            ignore_eos=True,  # its own; these are zoo's
            stop_token_ids=sorted(self.ends),
            detokenize=False,
        )

    def _adapter(self) -> Any:
        if self.lora_rank is None:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(_ADAPTER, 1, str(self.folder / "adapter"))


def seed_of(seed: int, number: int) -> int:
    """The seed of a prompt's first sample, of the run's seed and the prompt's number."""
    return (seed * 1_000_003 + number) * 1_000_003 % 2**62


def _shut_down(llm: Any) -> None:
    """End an engine of this process: vLLM would destroy zoo's process groups, too."""
    from vllm.distributed import parallel_state
    from vllm.v1.engine import core

    def own_groups() -> None:
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None

    with replaced(core, cleanup_dist_env_and_memory=own_groups):
        llm.llm_engine.engine_core.shutdown()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
