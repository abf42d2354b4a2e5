"""Everything that touches the inside of megatron-core: shims of its faults, running without a GPU."""
