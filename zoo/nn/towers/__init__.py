"""Towers of transformers on zoo's attention, and what ranks encoded gathered on each of them."""
