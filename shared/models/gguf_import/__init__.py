"""A GGUF file into a model folder: configuration, tokenizer and weights in Hugging Face's names and layout."""
