"""Checks of a recipe: architecture, model, layout and engine. Each refusal is one sentence with what would work."""
