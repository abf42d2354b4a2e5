"""Modules that families share and both backends use."""
