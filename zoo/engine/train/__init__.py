"""Training: the trainer, its optimizer, data, evaluation, step metrics, bad steps, and what a resumed run may change."""
