"""State dicts: their format, and how live state is packed into them and loaded from them."""
