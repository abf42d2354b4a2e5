"""Frozen weights held in fewer bits: how modules compute with them, and a file for each format."""
