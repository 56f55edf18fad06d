"""Who a process is on the bus, what it may do there, and who says so."""
