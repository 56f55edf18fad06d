"""What crosses a process: typed messages, subjects, streams, ids and the error tree."""
