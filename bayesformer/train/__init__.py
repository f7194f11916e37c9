"""Training: the objective, the one loop, its checkpoints, and many members of one method."""
