"""What zoo's maintainers measure, from a clone: `python -m benchmarks.NAME`. README.md lists the scripts and their results."""
