"""Training of one model: batches, loop, losses, weights, device."""
