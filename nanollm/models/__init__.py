"""Model definitions, and where their weights come from."""
