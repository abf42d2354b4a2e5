"""Rewards of sampled answers: zoo's own by name, functions of users in processes of their own, and a reward model's scores."""
