"""Steps that are not applied: which they are, and their files in the run folder."""
