"""What adapters of engines that are reached over HTTP have in common."""
