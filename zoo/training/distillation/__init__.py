"""Learning from a teacher's distributions of tokens."""
