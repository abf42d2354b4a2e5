"""Rows into samples: encoding through Hugging Face processors, labels, random changes."""
