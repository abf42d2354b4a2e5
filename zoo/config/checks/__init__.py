"""Checks of a recipe: model, layout, engine and training. Each refusal is one sentence with what would work."""
