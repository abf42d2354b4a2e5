"""`run.stage`: checkpoints are written to a folder on the local disk, and copied on to the run folder beside training."""
