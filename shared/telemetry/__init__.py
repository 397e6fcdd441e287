"""What the mesh tells about itself: metrics and traces. Imports no service; nothing that serves depends on it."""
