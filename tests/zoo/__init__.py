"""Small models of every family, and jobs around them."""
