"""Towers of transformers on zoo's attention, and the gathering of embeddings that ranks encoded."""
