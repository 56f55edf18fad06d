"""Bodies become calls: their types, and every value judged; nothing is silently ignored."""
