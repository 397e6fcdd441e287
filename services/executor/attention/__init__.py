"""How tokens look at earlier ones: a protocol and its backends. Owns rotary embedding and the write into the cache."""
