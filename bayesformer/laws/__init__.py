"""Laws over the vector of inferred weights: draws that were made, and Gaussians of blocks to draw from."""
