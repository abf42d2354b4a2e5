"""Where rows come from: files, tables, streams, hub sets, mixtures; what a row says of its media."""
