"""The verbs about recipes."""
