"""Curvature of the log-likelihood in a model's weights: hooks on its layers, and the forms of the matrix."""
