"""State dicts: their format, and the live state that they are packed from and loaded into."""
