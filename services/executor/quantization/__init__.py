"""Number formats of stored weights. Owns how their bytes become numbers."""
