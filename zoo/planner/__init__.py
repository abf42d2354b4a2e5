"""Memory and FLOPs of a run before anything is launched, and the parallel sizes that fit a machine."""
