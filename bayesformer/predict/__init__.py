"""Ways from a posterior to network outputs."""
