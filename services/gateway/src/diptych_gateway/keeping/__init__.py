"""What outlives a connection: records, kept answers, and journals read again."""
