"""Helpers that several folders of tests share; tests/conftest.py makes this package importable as `support`."""
