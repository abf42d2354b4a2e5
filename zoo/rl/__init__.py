"""The door for loops that are not zoo's, such as those of reinforcement learning: `zoo.Engine`."""
