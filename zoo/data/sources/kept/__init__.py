"""Rows and indexes that are read once and kept, for all ranks and later starts."""
