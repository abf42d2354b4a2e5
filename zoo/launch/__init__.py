"""Starting ranks: in this process, as child processes, or under torchrun or SLURM."""
