"""Recipe files, how they stand on each other, and the architectures that they are for."""
