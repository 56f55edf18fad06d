"""Sends leased power set-points to every worker's device, within the fleet's budget."""
