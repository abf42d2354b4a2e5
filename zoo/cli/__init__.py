"""The command `zoo`: one thin file per verb, each doing what a function of the package does."""
