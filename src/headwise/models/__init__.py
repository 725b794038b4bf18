"""Models: the trained one that headwise looks at by default, and those of others."""
