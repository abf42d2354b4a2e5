"""Recipe files: how they stand on each other."""
