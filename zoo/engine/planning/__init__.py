"""Plans of a recipe: the model's parameter statistics and costs, given to the arithmetic of `zoo.planner`."""
