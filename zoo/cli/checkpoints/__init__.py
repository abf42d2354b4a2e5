"""The subcommands that convert, compare and ask checkpoints."""
