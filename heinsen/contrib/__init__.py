"""Parts that the core does without: it never imports this package, except by one lazy look-up for each member."""
