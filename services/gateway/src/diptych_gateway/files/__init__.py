"""`/v1/files`: uploads in parts, the store, lists in pages."""
