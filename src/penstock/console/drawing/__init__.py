"""Coordinates for what people look at: pure, and without a word about how it is drawn."""
