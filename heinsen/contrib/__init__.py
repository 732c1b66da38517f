"""What the core does not need: it reaches each package here through one lazy look-up, and only on demand."""
