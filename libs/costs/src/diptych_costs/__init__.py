"""What work costs: pure formulas, and numbers with their sources."""
