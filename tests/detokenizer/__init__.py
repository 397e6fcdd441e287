"""Tests of `services.detokenizer`."""
