"""How files get from elsewhere to this machine: one module a kind of source, and one resumable transfer below them."""
