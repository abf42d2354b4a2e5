"""How checkpoints are kept: copied aside, written and published in the background, checked and chosen."""
