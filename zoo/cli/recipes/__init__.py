"""The subcommands about recipes and families."""
