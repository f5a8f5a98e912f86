"""Rewards: how good a response is, as one number in [0, 1] or a missing value."""
