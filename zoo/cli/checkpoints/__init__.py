"""The verbs about checkpoints."""
