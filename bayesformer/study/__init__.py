"""Studies: questions answered by many runs and one figure or table, each a command."""
