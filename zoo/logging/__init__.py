"""The output of a run: messages, train.jsonl, the loss plot, times of steps and of the start, the result."""
