"""What a run writes and shows: log lines, train.jsonl, the loss plot, times of steps and of the start, the result."""
