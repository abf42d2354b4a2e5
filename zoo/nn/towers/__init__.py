"""Towers of transformers on zoo's attention, encoders of sound, and the gathering of embeddings that ranks encoded."""
