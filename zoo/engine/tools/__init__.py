"""What the verbs call: convert, verify, score, and the status of a run."""
