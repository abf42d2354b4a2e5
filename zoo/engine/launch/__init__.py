"""Who starts ranks: this process, zoo's own launcher, torchrun or SLURM."""
