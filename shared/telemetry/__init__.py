"""What the mesh tells about itself: metrics and traces. Imports no service."""
