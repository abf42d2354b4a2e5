"""Plan a run before it costs anything: memory, FLOPs and parallel sizes on GPUs that need not be here."""

import zoo
from zoo.errors import ConfigError

GPUS = 8


def plan(recompute: str, budget: int) -> str:
    """One line on Qwen3-VL 30B-A3B with rows of `budget` tokens on H200s; no weight is loaded."""
    overrides = ["size=30b-a3b", f"hardware={GPUS}xh200", f"packing.budget={budget}"]
    overrides += [f"engine.recompute={recompute}"] if recompute else []  # else the planner chooses
    try:
        found = zoo.plan(zoo.load_recipe("qwen3_vl_sft", overrides=overrides), ranks=GPUS)
    except ConfigError as error:  # no layout fits; the message says which machine or budget would
        return str(error)
    parallel = found.recipe.parallel
    sizes = ", ".join(f"{name}={getattr(parallel, name)}" for name in ("tp", "pp", "cp", "ep"))
    needs, flops = found.worst.total / 1e9, sum(found.step.values()) / 1e15
    verb = "fits" if found.fits else "DOES NOT FIT"
    return (
        f"{sizes}, recompute {found.recipe.engine.recompute}: {needs:.0f} GB a rank ({verb}), {flops:.0f} PFLOPs a step"
    )


for recompute, budget in (("", 8192), ("", 65536), ("none", 131072)):
    print(f"budget {budget}, recompute {recompute or 'planned'}: {plan(recompute, budget)}")
