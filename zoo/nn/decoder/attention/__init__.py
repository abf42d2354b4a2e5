"""How the tokens of a sample see one another: self-attention, Gated DeltaNet, rotary angles, and what both remember while decoding."""
