"""What a rank is: process groups, small values between ranks, the order of gradient reductions, signals, process state."""
