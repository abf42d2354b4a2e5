"""Where rows come from: files, tables, streams, hub sets, mixtures; references to media."""
