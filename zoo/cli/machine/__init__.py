"""The verbs about the machine."""
