"""What the public names are made of. Import from ``svb_jax`` itself: nothing below here is a promise."""
