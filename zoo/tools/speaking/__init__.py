"""Speech of a checkpoint with a talker: codes, audio, and rows that have them as targets."""
