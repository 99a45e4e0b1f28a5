"""Adapters for other libraries' interfaces. Each is imported only by those who use it."""
