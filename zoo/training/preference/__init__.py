"""Training on preference pairs: log-probabilities of a reference, and metrics of held-out pairs."""
