"""Sharded tensors on a disk: cut into pieces, copied to the host, written by several threads, indexed, read by range."""
