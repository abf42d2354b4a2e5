"""The verbs that train and look at runs and rows."""
