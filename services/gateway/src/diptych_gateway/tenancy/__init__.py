"""Who asks, with which rights, within which limits, and what was used."""
