"""Telemetry: what a process tells about its own work. Nothing that serves a request depends on it."""
