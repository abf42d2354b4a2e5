"""Command lines and files of other trainers: recognised, and answered with what does the same here."""
