"""zoo inside of frameworks that others have written; each file needs its framework installed."""
