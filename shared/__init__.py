"""What every Shoal service speaks: messages, transport, actors, configuration. Imports no service."""
