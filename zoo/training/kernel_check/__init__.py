"""Checks of the kernels that recipes would use: of any recipes, of one before it trains, of one kernel in a process of its own."""
