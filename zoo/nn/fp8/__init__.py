"""Matrix products in FP8 whose values share a scale in blocks of 128: formats, their kernel, and the decoder's linears."""
