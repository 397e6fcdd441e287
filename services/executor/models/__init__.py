"""Model families, one a file. Owns their architecture and the names of their weights; `registry` finds one by name."""
