"""Runs after the fact: what their folders hold, compared on one page."""
