"""Real packed rows of a recipe's data, to be looked at: as a picture, a page and statistics."""
