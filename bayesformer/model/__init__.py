"""A user's module as a function of its inferred weights: spaces, shells, calls, randomness."""
