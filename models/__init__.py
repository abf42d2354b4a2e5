"""The model families: one folder each, imported as `zoo.models.<family>`."""
