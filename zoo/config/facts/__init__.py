"""What a recipe's values tell, without its schema: of the architecture, and when keys have an effect."""
