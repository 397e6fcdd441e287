"""What a number format costs in quality. `shoal evaluate` runs `python -m services.executor.evaluate`."""
