"""What each role may do on the bus: one table (`table`), in the server's words (`granting`)."""
