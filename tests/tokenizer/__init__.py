"""Tests of `services.tokenizer`."""
