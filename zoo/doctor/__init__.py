"""Whether the kernels that a recipe would use are right on this machine: forward and gradients against plain references."""
