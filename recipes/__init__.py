"""Recipes and their overlays, as YAML: tasks here, sizes under `sizes/<family>/`, machines under `hardware/`."""
