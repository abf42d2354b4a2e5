"""What a run calls at its steps, evaluations and saves: users' callbacks, trackers and early stopping."""
