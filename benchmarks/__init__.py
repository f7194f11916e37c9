"""Speed as ratios: `make bench`. What is compared runs interleaved in one process; never a timed test."""
