"""Showing heads: heat maps (matplotlib), tables (terminal)."""
