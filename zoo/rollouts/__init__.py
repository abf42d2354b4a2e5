"""Steps from rollouts: sampled answers, their rewards and advantages, in the place of a loader's rows (docs/rl.md)."""
