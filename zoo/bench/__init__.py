"""What `zoo bench` measures for users: training steps, the loading of data, and what saves cost a run."""
