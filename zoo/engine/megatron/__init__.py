"""Everything that touches the inside of megatron-core: shims, probes of its faults, running without a GPU, safe reading."""
