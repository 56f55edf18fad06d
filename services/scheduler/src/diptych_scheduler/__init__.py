"""The scheduler: pulls requests, decides where they run, and answers for their end."""
