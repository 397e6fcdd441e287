"""Models on disk: the store that holds them, how they get in, and their configuration. No tensors are computed here."""
