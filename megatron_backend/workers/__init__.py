"""One process per rank: what it does, and how the driver calls all of them at once."""
