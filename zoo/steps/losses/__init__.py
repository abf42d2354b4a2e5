"""Losses of whole answers, and of a student beside its teacher."""
