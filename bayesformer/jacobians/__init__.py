"""Per-example derivatives of a model, found at the places of a forward pass where a parameter meets the data."""
