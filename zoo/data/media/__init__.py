"""Media of rows: decoding, sizes from headers, and worker processes that decode under limits."""
