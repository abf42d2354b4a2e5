"""Checkpoint folders on disk: strict reading, atomic writing, quantised weights, files beside the weights."""
