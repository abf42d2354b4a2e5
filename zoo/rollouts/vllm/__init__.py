"""vLLM as what generates rollouts: an engine of it in the ranks' own processes, with the trainer's weights."""
