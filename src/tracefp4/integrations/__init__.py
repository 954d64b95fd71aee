"""Other people's engines and trainers. The outermost layer: it imports everything and nothing imports it."""
