"""The command `zoo`: one thin file for each subcommand, by what it is about, each doing what a function of the package does."""
