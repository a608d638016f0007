"""Examples; each is a package of its own."""
