"""What `zoo bench` measures: training, saves, soaks, data, conversion, balance, packing. A file for each, and what they share."""
