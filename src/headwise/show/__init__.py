"""Showing heads: heat maps (matplotlib), tables (terminal), and hand-made heads to show."""
