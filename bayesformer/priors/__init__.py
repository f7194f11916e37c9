"""Distributions of a weight, and priors that assign them to parameters by name pattern."""
