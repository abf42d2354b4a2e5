"""A whole model on the fused kernels, run by Triton's interpreter on the CPU in fp32, against the model without them.

    TRITON_INTERPRET=1 python tests/support/interpret_model.py FOLDER glm45v

Prints as JSON the relative errors of loss and gradient (as one vector), the worst of a parameter, and which kernels ran. A
process of its own, as Triton decides when it is imported.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from triton.runtime.interpreter import InterpretedFunction

from support.engine import packed_batch, single_process_world
from support.families import FAMILIES
from zoo.nn import head
from zoo.nn.decoder import mlp, norm
from zoo.nn.decoder.attention import delta_inputs, gated_delta_net, rotary, self_attention
from zoo.nn.towers import attention as tower_attention

MODULES: tuple[Any, ...] = (self_attention, delta_inputs, gated_delta_net, mlp, norm, rotary, head, tower_attention)


def segments(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, scale: float, *, causal: bool) -> Tensor:
    """In the place of flash attention, which wants a GPU: a call for each segment."""
    parts = []
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        one = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*one, is_causal=causal, scale=scale)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


# Sizes at which a tower's kernels run; an MLP of 44 values is no multiple of 8.
TOWERS: dict[str, Any] = {
    "qwen25_omni": {"vision": {"hidden_size": 64, "num_heads": 4, "intermediate_size": 44}},
    "glm45v": {"hidden_size": 64, "vision": {"hidden_size": 64, "num_heads": 4, "hidden_act": "silu"}},
}


def main(folder: Path, family: str) -> dict[str, Any]:
    table = FAMILIES[family]
    ran: set[str] = set()
    launch = InterpretedFunction.run

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        ran.add(f"{Path(self.fn.__code__.co_filename).stem}.{self.fn.__name__}")
        return launch(self, *arguments, **options)

    InterpretedFunction.run = run  # type: ignore[method-assign]
    folder = table.write(folder, **TOWERS.get(family, {}))
    with single_process_world() as world:
        model = table.zoo(folder, world)
        examples = table.examples(model.assembly.processor)
        mixture = next((name for name in examples if "+" in name), next(iter(examples)))  # of all media of the family
        samples = [examples[name].sample for name in (mixture, "text-short")]
        batches, labels = [packed_batch(samples)], sum(int((s.labels != -100).sum()) for s in samples)
        loss, wanted = model.gradients(batches, labels)
        assert not ran
        for module in MODULES:
            module.fused = lambda x: x.is_floating_point()
        tower_attention.varlen_attention = segments  # type: ignore[assignment]
        join = tower_attention.joined

        def joined(*arguments: Any) -> Tensor:
            ran.add("linears.joined")
            return join(*arguments)

        tower_attention.joined = joined
        fused_loss, found = model.gradients(batches, labels)
    whole = torch.stack([x.norm() for x in wanted.values() if x is not None]).norm()
    errors = {name: float((found[name] - x).norm() / whole) for name, x in wanted.items() if x is not None}  # type: ignore[operator]
    return {
        "loss": abs(fused_loss - loss) / loss,
        "gradient": sum(error**2 for error in errors.values()) ** 0.5,
        "worst": max(errors, key=errors.__getitem__),
        "kernels": sorted(ran),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
