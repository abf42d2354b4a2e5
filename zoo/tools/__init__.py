"""The functions behind the verbs: convert, verify, score, and the status of a run."""
