"""The verbs that let a model answer."""
