"""Programs with one planted fault each, and their correct twins."""
