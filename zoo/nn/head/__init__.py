"""What becomes of the decoder's last states: losses of tokens, entropies, scores, and what a teacher says of them."""
