"""Who watches a run: heartbeats, progress, diagnosis of a lost rank, resources, the lock of the run folder."""
