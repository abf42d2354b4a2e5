"""The subcommands that train, and measure or show runs, rows and the machine."""
