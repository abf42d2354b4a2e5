"""From a recipe to a trained model, cell by cell."""

# %% [markdown]
# # From a recipe to a trained model, cell by cell
#
# Jupyter and editors open this file as a notebook (cells begin with `# %%`); as a script it runs as it is, too.
# It takes a minute on two cores without a GPU, on the digits that come with zoo.

# %%
import zoo

recipe = zoo.load_recipe("qwen3_vl_sft", overrides=["size=tiny", "nproc=1", "run.dir=runs/notebook"])
print(recipe.model.family, recipe.packing.budget, recipe.train.lr)

# %% [markdown]
# A recipe never changes; `replace` makes another one, and checks it as it checks a command line.

# %%
recipe = recipe.replace(
    {"train.lr": 2e-3, "data.augment": 0.0},
    train={"steps": 12, "warmup_steps": 2, "global_batch": 2, "eval_rows": 8},
    packing=zoo.PackingConfig(budget=256),
)

# %% [markdown]
# What the run will take, before it takes it.

# %%
plan = zoo.plan(recipe, ranks=1)
print(f"{sum(plan.parameters.values()):,} parameters, {plan.worst.total / 1e6:.0f} MB, fits: {plan.fits}")

# %% [markdown]
# `zoo.train` is what `zoo train` calls; its ranks are processes of their own, so this one stays as it is. A run that was stopped goes on from its folder when the cell is run again.

# %%
result = zoo.train(recipe)
print(f"{result.steps} steps, loss {result.losses[0]:.2f} -> {result.losses[-1]:.2f}")
print(f"exact match {result.metrics['exact_match']:.2f}, checkpoint {result.checkpoint}")

# %% [markdown]
# A recipe may also be built of its parts, without a file.

# %%
by_hand = zoo.Recipe(
    size="tiny",
    nproc=1,
    model=zoo.ModelConfig(family="qwen3_vl"),
    packing=zoo.PackingConfig(budget=256),
    train=zoo.TrainConfig(steps=2, global_batch=2, eval_rows=4),
    run=zoo.RunConfig(dir="runs/by_hand"),
    export=False,
)
print(zoo.train(by_hand).steps, "steps")
